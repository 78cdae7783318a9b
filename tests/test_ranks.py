"""The ranks that other tests stand on."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks


def sum_of_ranks(rank: int, offset: float) -> torch.Tensor:
    total = torch.tensor(rank + offset)
    dist.all_reduce(total)
    return total


def raise_on_rank_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("not me")
    dist.barrier()


def die_on_rank_zero(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_environment(rank: int) -> tuple[str, str]:
    return os.environ["RANK"], os.environ["FLAVOUR"]


def test_results_come_back_in_order_of_rank():
    assert [t.item() for t in run_ranks(3, sum_of_ranks, 0.5)] == [4.5, 4.5, 4.5]
    assert run_ranks(2, return_environment, environment={"FLAVOUR": "up"}) == [("0", "up"), ("1", "up")]


def test_an_exception_on_one_rank_is_raised_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1: ValueError(.|\n)*raise_on_rank_one(.|\n)*not me"):
        run_ranks(2, raise_on_rank_one)


def test_a_killed_rank_is_told_from_its_neighbours():
    with pytest.raises(RankError, match="rank 0: died") as caught:
        run_ranks(2, die_on_rank_zero)
    assert caught.value.exitcode == -signal.SIGKILL


def test_failures_can_be_returned():
    outcomes = run_ranks(2, raise_on_rank_one, failures="return")
    assert outcomes[1].kind == "ValueError"
