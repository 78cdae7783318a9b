"""A bucket's whole gradients, let go of when they have been reduced: torch 2.12 keeps them for one bucket too long.

FSDP2 holds the input of a reduce-scatter until the next bucket's backward pass is done, and drops it before it makes the next
input. In 2.12 (not in 2.11, nor in 2.13) a variable of the loop that drops it lives on, and with it the input: at the peak two
buckets of gradients are there where one is planned (7 percent of the peak of a small model: ZeRO 3, blocks recomputed).
What 2.12 does inside `post_backward` is done here before it, and its loop then finds nothing to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ultrascale.torch_private import fsdp_state

HAS_THE_FAULT = torch.__version__.startswith("2.12.")


def release_reduced_buckets(modules: Sequence[FSDPModule]) -> None:
    """Let every bucket of `modules` (FSDP2's, all of one model) drop the inputs of past reductions in time. On 2.12 only."""
    if HAS_THE_FAULT:
        for state in {fsdp_state(module) for module in modules}:
            for group in state._fsdp_param_groups:
                release_before_reducing(group)


def release_before_reducing(group: Any) -> None:
    """Let the FSDPParamGroup `group`, from now on, wait for past reductions and drop their inputs before its own."""

    def post_backward(*unused: Any) -> None:
        states = group.comm_ctx.reduce_scatter_states
        # Of several groups of one module the last comes first on the way back.
        if group._param_group_index == group._num_param_groups - 1:
            while states:
                _wait(states.pop(), group)
        type(group).post_backward(group, *unused)

    group.post_backward = post_backward


def _wait(reduction: Any, group: Any) -> None:
    if reduction.event is not None:
        group.device_handle.current_stream().wait_event(reduction.event)
