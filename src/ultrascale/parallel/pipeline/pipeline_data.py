"""FSDP2 under a pipeline: gathers in the order of the blocks, and reductions where a backward pass ends without autograd.

Backward passes B do what FSDP2 does by itself (`parallel.data.data_parallel.prepare_action` tells it when to reduce): buckets
are reduced while the blocks before them still compute. W is no backward pass to it: gradients appear, and it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ultrascale.models.decoder import Decoder, PredictionBlock
from ultrascale.parallel.data.data_parallel import prepare_action
from ultrascale.schedules.actions import Action
from ultrascale.torch_private import end_backward, fsdp_buckets, fsdp_state


def order_gathers(stage: Decoder) -> None:
    """Let the backward pass of every bucket start the gather of the next on the way back.

    Left alone FSDP2 goes by the order of past forward passes, and after the first bucket of one micro-batch gathers the last of
    another.
    """
    if not isinstance(stage, FSDPModule):
        return
    blocks = reversed([block for _, block in stage.blocks()])
    modules = [stage, *(module for block in blocks for module in _backward_order(block) if isinstance(module, FSDPModule))]
    buckets = {fsdp_state(module): module for module in modules}
    for module, following in pairwise(buckets.values()):
        module.set_modules_to_backward_prefetch([following])
    for module in list(buckets.values())[-1:]:  # itself, which is there: with none named FSDP2 goes by past forward passes
        module.set_modules_to_backward_prefetch([module])


def _backward_order(block: nn.Module) -> Iterator[nn.Module]:
    """The modules of a block in the order of its backward pass, as far as FSDP2 manages them: the norm that is read behind a
    block of multi-token prediction, the block, its experts."""
    if isinstance(block, PredictionBlock):
        yield block.shared_head.norm
    yield from block.modules()


def prepare_backward(stage: Decoder, action: Action) -> None:
    """Prepares FSDP2 for the B or I `action`: what to do with gradients and all-gathered parameters."""
    prepare_action(stage, action)
    if isinstance(stage, FSDPModule) and action.reduce_gradients:
        for group in fsdp_buckets(stage):
            if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
                _widen(group)


def reduce_weight_gradients(stage: Decoder, action: Action) -> None:
    """Adds the gradients of the W `action` to those of earlier micro-batches, and reduces them if it says so."""
    if not isinstance(stage, FSDPModule):
        return
    prepare_action(stage, action)
    for group in fsdp_buckets(stage):
        if action.reduce_gradients:
            _widen(group)
        group.post_backward()
    end_backward(stage)


def _widen(group: Any) -> None:
    """Let every parameter of a bucket have a gradient, in the dtype of the sum.

    FSDP2 reduces what is there, in one dtype, and adds up reductions of one length. A norm's gradient is made in I: at one W
    there may be several micro-batches' of it, already in the wide dtype, and at the next none.
    """
    for parameter in group.fsdp_params:
        if parameter.unsharded_accumulated_grad is None:
            if parameter.unsharded_param.grad is None:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            parameter.to_accumulated_grad_if_needed()
