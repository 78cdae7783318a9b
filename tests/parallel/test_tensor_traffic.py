"""What CUDA's collectives are given: the same parts and sums as the CPU's messages, and no copies where there need be none."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ultrascale.parallel.tensor import tensor_traffic
from ultrascale.parallel.tensor.tensor_traffic import all_gather_sequence, all_gather_stacked, reduce_scatter_sequence


def found(rank: int, batch: int, collectives: bool) -> list[torch.Tensor]:
    tensor_traffic.has_collectives = lambda tensor: collectives
    group, length = dist.group.WORLD, 3 * dist.get_world_size()
    assert group is not None
    whole = torch.arange(batch * length * 2, dtype=torch.float64).view(batch, length, 2)
    part = whole[:, 3 * rank : 3 * rank + 3]
    gathered = all_gather_sequence(part, length, group)()
    assert torch.equal(gathered, whole)
    return [gathered, reduce_scatter_sequence(whole * (rank + 1), group)(), all_gather_stacked(part[0], group)]


@pytest.mark.parametrize("batch", [1, 2])
def test_gathers_and_sums_are_the_same_by_collectives_and_by_messages(batch):
    for ours, theirs in zip(run_ranks(3, found, batch, False), run_ranks(3, found, batch, True), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def copies(rank: int, batch: int) -> bool:
    """Whether the gathered sequence is memory of its own, beside what the collective filled."""
    tensor_traffic.has_collectives = lambda tensor: True
    filled, gather = [], dist.all_gather_into_tensor

    def noting(into: torch.Tensor, *rest: object, **options: object) -> object:
        filled.append(into)
        return gather(into, *rest, **options)  # pyright: ignore

    dist.all_gather_into_tensor = noting  # pyright: ignore
    assert dist.group.WORLD is not None
    result = all_gather_sequence(torch.ones(batch, 3, 2), 6, dist.group.WORLD)()
    return result.data_ptr() != filled[0].data_ptr()


def test_of_one_sequence_what_arrives_is_the_whole():
    assert run_ranks(2, copies, 1) == [False, False]
    assert run_ranks(2, copies, 2) == [True, True]
