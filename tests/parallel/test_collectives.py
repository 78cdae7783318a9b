"""All-gather and reduce-scatter by messages from every rank to every other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.families import FAMILIES
from ranks import run_ranks

from ultrascale.check.prove import shrink_model
from ultrascale.description.layout import Layout
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.data.collectives import DirectAllGather, DirectReduceScatter
from ultrascale.parallel.data.data_parallel import sharded_modules
from ultrascale.parallel.mesh import Ranks

SIZE = 5


def gathered(rank: int, asynchronous: bool) -> torch.Tensor:
    """Each rank's part is its number, five times."""
    comm, world = DirectAllGather(), dist.get_world_size()
    whole = comm.allocate((SIZE * world,), dtype=torch.bfloat16, device=torch.device("cpu")).fill_(-1)
    own = whole[SIZE * rank : SIZE * (rank + 1)].fill_(rank)
    assert dist.group.WORLD is not None
    work = comm(whole, own, dist.group.WORLD, async_op=asynchronous)
    assert (work is not None) == asynchronous
    if work is not None:
        work.wait()
    return whole


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_gets_every_part_in_order(world, asynchronous):
    expected = torch.arange(world).repeat_interleave(SIZE).bfloat16()
    assert all(torch.equal(found, expected) for found in run_ranks(world, gathered, asynchronous))


def contribution(rank: int, world: int) -> torch.Tensor:
    return torch.randn(SIZE * world, generator=torch.Generator().manual_seed(rank))


def scattered(rank: int) -> tuple[torch.Tensor, bool]:
    comm, world = DirectReduceScatter(), dist.get_world_size()
    given, part = contribution(rank, world), torch.empty(SIZE)
    assert dist.group.WORLD is not None
    comm(part, given, dist.group.WORLD, dist.ReduceOp.SUM)
    return part, torch.equal(given, contribution(rank, world))


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_the_sum_of_its_part_added_in_order_of_ranks_and_its_input_stays(world):
    total = contribution(0, world)
    for rank in range(1, world):
        total += contribution(rank, world)
    found = run_ranks(world, scattered)
    assert torch.equal(torch.cat([part for part, _ in found]), total) and all(is_whole for _, is_whole in found)


def collectives_of(rank: int, layout: Layout) -> set[tuple[str, str]]:
    ranks = Ranks(rank, layout.dp, torch.device("cpu"))
    decoder = build_share(shrink_model(FAMILIES["llama"]), layout, ranks, seed=0).decoder
    groups: list[Any] = [module._get_fsdp_state()._fsdp_param_group for module in sharded_modules(decoder)]
    return {(type(group._all_gather_comm).__name__, type(group._reduce_scatter_comm).__name__) for group in groups}


def test_cut_state_over_gloo_goes_by_them_and_whole_state_is_not_scattered():
    cut = run_ranks(2, collectives_of, Layout(dp=2, zero_stage=3))
    whole = run_ranks(2, collectives_of, Layout(dp=2))
    assert cut == [{("DirectAllGather", "DirectReduceScatter")}] * 2
    assert whole == [{("DefaultAllGather", "NothingToScatter")}] * 2
