"""FSDP2 under a pipeline: gathers in the order of the blocks, and reductions where a backward pass ends without autograd.

Backward passes B do what FSDP2 does by itself (`parallel.data.prepare_action` tells it when to reduce): buckets are reduced
while the blocks before them still compute. W is no backward pass to it: gradients appear, and it is told.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ultrascale.models.decoder import Decoder
from ultrascale.parallel.data import prepare_action
from ultrascale.schedules.actions import Action


def order_gathers(stage: Decoder) -> None:
    """Let the backward pass of every bucket start the gather of the next on the way back.

    Left alone FSDP2 goes by the order of past forward passes, and after the first bucket of one micro-batch gathers the last of
    another.
    """
    if not isinstance(stage, FSDPModule):
        return
    blocks = reversed([block for _, block in stage.blocks()])
    modules = [stage, *(module for block in blocks for module in block.modules() if isinstance(module, FSDPModule))]
    buckets = {_state(module): module for module in modules}
    for module, following in pairwise(buckets.values()):
        module.set_modules_to_backward_prefetch([following])


def reduce_weight_gradients(stage: Decoder, action: Action) -> None:
    """After the W `action`: sum its gradients with those of earlier micro-batches, and reduce if it says so."""
    if not isinstance(stage, FSDPModule):
        return
    prepare_action(stage, action)
    root = _state(stage)
    for state in reversed(root._state_ctx.all_states):
        for group in _groups(state):
            if action.reduce_gradients:
                _complete(group)
            group.post_backward()
    root._root_post_backward_final_callback()


def _complete(group: Any) -> None:
    """Give zeros to parameters without a gradient: FSDP2 reduces those that have one, and sums of the step need one length.

    A norm's are made in I, so that it may have those of several micro-batches at one W and none at the next.
    """
    for parameter in group.fsdp_params:
        if parameter.unsharded_accumulated_grad is None and parameter.unsharded_param.grad is None:
            parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)


def _state(module: nn.Module) -> Any:
    return fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess]


def _groups(state: Any) -> list[Any]:
    """Of torch 2.12 and later several, before that one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(reversed(state._fsdp_param_groups))
    return [state._fsdp_param_group] if state._fsdp_param_group else []
