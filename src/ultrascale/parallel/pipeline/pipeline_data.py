"""FSDP2 under a pipeline: prefetches all-gathers in the order of the blocks, and reduces gradients where a pass ends without an
autograd backward.

In backward passes B FSDP2 works as usual (`parallel.data.data_parallel.prepare_action` sets when to reduce): buckets are
reduced while the backward pass goes on. W is no backward pass for FSDP2: gradients are set directly, and the reduction is
triggered here.
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
    """Make the backward pass of every bucket prefetch the all-gather of the bucket that comes next in backward order.

    By default FSDP2 follows the order of past forward passes, and after the first bucket of one micro-batch it would gather the
    last of another.
    """
    if not isinstance(stage, FSDPModule):
        return
    blocks = reversed([block for _, block in stage.blocks()])
    modules = [stage, *(module for block in blocks for module in _backward_order(block) if isinstance(module, FSDPModule))]
    buckets = {fsdp_state(module): module for module in modules}
    for module, following in pairwise(buckets.values()):
        module.set_modules_to_backward_prefetch([following])
    for module in list(buckets.values())[-1:]:  # names itself, already gathered: with none FSDP2 uses past forward order
        module.set_modules_to_backward_prefetch([module])


def _backward_order(block: nn.Module) -> Iterator[nn.Module]:
    """FSDP2-managed modules of a block in backward order: the norm after a multi-token prediction block, the block, its
    experts."""
    if isinstance(block, PredictionBlock):
        yield block.shared_head.norm
    yield from block.modules()


def prepare_backward(stage: Decoder, action: Action) -> None:
    """Set what FSDP2 does with gradients and all-gathered parameters in the B or I `action`."""
    prepare_action(stage, action)
    if isinstance(stage, FSDPModule) and action.reduce_gradients:
        for group in fsdp_buckets(stage):
            if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
                _widen(group)


def reduce_weight_gradients(stage: Decoder, action: Action) -> None:
    """Add the gradients of the W `action` to those of earlier micro-batches, and reduce them if the action says so."""
    if not isinstance(stage, FSDPModule):
        return
    prepare_action(stage, action)
    for group in fsdp_buckets(stage):
        if action.reduce_gradients:
            _widen(group)
        group.post_backward()
    end_backward(stage)


def _widen(group: Any) -> None:
    """Give every parameter of a bucket a gradient, in the dtype of the sum.

    FSDP2 reduces the gradients that exist, in one dtype, and accumulates reductions of equal length. But a norm's gradient is
    computed in I: at one W there may be those of several micro-batches, already in the wide dtype, and at the next none.
    """
    for parameter in group.fsdp_params:
        if parameter.unsharded_accumulated_grad is None:
            if parameter.unsharded_param.grad is None:
                parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)
            parameter.to_accumulated_grad_if_needed()
