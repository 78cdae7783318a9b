"""Whole gradients of a bucket do not outlive their reduction."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from ultrascale.parallel.data.reduced_buckets import release_before_reducing


class GroupOfTorch212:
    """A group of FSDP2 as torch 2.12 has it: the variable of its loop keeps the last input."""

    def __init__(self, contexts: Any, index: int = 0, groups: int = 1):
        self.comm_ctx, self._param_group_index, self._num_param_groups = contexts, index, groups
        self.waited: list[Any] = []
        stream = SimpleNamespace(wait_event=self.waited.append)
        self.device_handle = SimpleNamespace(current_stream=lambda: stream)
        self.watched: weakref.ref | None = None
        self.living_while_reducing = 0

    def post_backward(self, *unused: Any) -> None:
        for state in self.comm_ctx.reduce_scatter_states:
            state.event  # noqa: B018
        self.living_while_reducing = int(self.watched is not None and self.watched() is not None)


def group_after_a_reduction(**place: int) -> GroupOfTorch212:
    reduced = torch.zeros(4)
    states = [SimpleNamespace(reduce_scatter_input=reduced, event="reduced")]
    group = GroupOfTorch212(SimpleNamespace(reduce_scatter_states=states), **place)
    group.watched = weakref.ref(reduced)
    return group


def test_the_input_of_the_last_reduction_is_waited_for_and_gone_before_the_next_one() -> None:
    group = group_after_a_reduction()
    release_before_reducing(group)
    group.post_backward()
    assert (group.waited, group.comm_ctx.reduce_scatter_states, group.living_while_reducing) == (["reduced"], [], 0)


def test_a_second_group_of_the_same_module_does_not_wait_for_the_first() -> None:
    group = group_after_a_reduction(index=0, groups=2)
    release_before_reducing(group)
    group.post_backward()
    assert (group.waited, len(group.comm_ctx.reduce_scatter_states)) == ([], 1)
