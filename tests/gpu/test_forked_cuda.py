"""Forked ranks of a process that has computed on a GPU, as a notebook has."""

import pytest
import torch

from ultrascale.launch.forked import forks_compute, run_forked

pytestmark = pytest.mark.gpu


def double(rendezvous: str, number: float) -> float:
    value = torch.tensor(number, requires_grad=True)
    (value * value).backward()
    assert value.grad is not None
    return value.grad.item()


def test_ranks_compute_where_this_process_has_computed_on_a_gpu():
    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
    assert not forks_compute()
    assert run_forked(2, double, 3.0) == [6.0, 6.0]
