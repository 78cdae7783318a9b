"""Frees a bucket's unsharded gradients as soon as they are reduced: torch 2.12 keeps them for one bucket too long.

FSDP2 holds the input of a reduce-scatter until the next bucket's backward pass is done, and drops it before it makes the next
input. In 2.12 (not in 2.11, nor in 2.13) a leftover loop variable keeps that input alive: at the peak there are two buckets of
gradients where one is planned (7 percent of the peak of a small model: ZeRO 3, blocks recomputed). The code here does the work
of 2.12's loop in `post_backward` before it runs, so that the loop finds nothing to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ultrascale.torch_private import fsdp_state

HAS_THE_FAULT = torch.__version__.startswith("2.12.")


def release_reduced_buckets(modules: Sequence[FSDPModule]) -> None:
    """Make every bucket of `modules` (FSDP2's, all of one model) free the inputs of past reductions in time. Acts on 2.12
    only."""
    if HAS_THE_FAULT:
        for state in {fsdp_state(module) for module in modules}:
            for group in state._fsdp_param_groups:
                release_before_reducing(group)


def release_before_reducing(group: Any) -> None:
    """Make the FSDPParamGroup `group` wait for past reductions and free their inputs before it starts its own."""

    def post_backward(*unused: Any) -> None:
        states = group.comm_ctx.reduce_scatter_states
        # The last of a module's groups comes first in the backward pass.
        if group._param_group_index == group._num_param_groups - 1:
            while states:
                _wait(states.pop(), group)
        type(group).post_backward(group, *unused)

    group.post_backward = post_backward


def _wait(reduction: Any, group: Any) -> None:
    if reduction.event is not None:
        group.device_handle.current_stream().wait_event(reduction.event)
