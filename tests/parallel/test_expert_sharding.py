"""Experts cut over ranks by ep, and again by FSDP2 over the ranks that repeat them, in float64."""

from __future__ import annotations

import pytest
import torch
from parallel.expert_cases import Cut, Outcome, assembled, draw, error, formula, loss_of, my_dispatch, my_experts
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

TWICE = Cut(4, ep=2)
"""Ranks 0 and 2 hold the first half of the experts, 1 and 3 the second."""


def one_rank(rank: int, choices: str, mode: str) -> Outcome:
    """Two micro-batches, the second the first again; gradients reduced after each, or after the last one."""
    whole, dispatch = draw(TWICE, choices), my_dispatch(rank, TWICE)
    experts = my_experts(rank, TWICE, whole)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_dp", "ep"))
    fully_shard(experts, mesh=mesh["expert_dp"])
    assert isinstance(experts, FSDPModule)
    experts.set_force_sum_reduction_for_comms(True)
    experts.set_gradient_divide_factor(2.0 if mode == "averaged" else 1.0)
    tokens, weights = (t[rank].clone().requires_grad_() for t in (whole.tokens, whole.weights))
    results = tokens
    for micro_batch in range(2):
        experts.set_requires_gradient_sync(mode != "once" or micro_batch == 1)
        results = dispatch(tokens, (whole.chosen[rank], weights), experts)
        (loss_of(results) / 2.0).backward()
    gradients = [p.grad for p in experts.parameters()]
    full = [g.full_tensor() for g in gradients if isinstance(g, DTensor)]
    assert tokens.grad is not None and weights.grad is not None
    return Outcome(results.detach(), tokens.grad, weights.grad, *full)


def error_of(choices: str, mode: str) -> float:
    return error(assembled(run_ranks(4, one_rank, choices, mode), TWICE), formula(draw(TWICE, choices)))


@pytest.mark.parametrize("mode", ["each", "once"])
@pytest.mark.parametrize("choices", ["2", "2-one-expert", "2-dropped"])
def test_experts_across_dp_with_fsdp_have_the_gradients_of_one_process(choices, mode):
    assert error_of(choices, mode) < 1e-12


def test_an_average_over_ranks_is_seen():
    assert error_of("2", "averaged") > 0.1


def gradients_there(rank: int) -> list[bool]:
    whole, dispatch = draw(TWICE, "1-one-expert"), my_dispatch(rank, TWICE)
    experts = my_experts(rank, TWICE, whole)
    dispatch(whole.tokens[rank].requires_grad_(), (whole.chosen[rank], whole.weights[rank]), experts).sum().backward()
    return [parameter.grad is not None for parameter in experts.parameters()]


def test_experts_that_nobody_visits_get_gradients_of_zero_and_hold_up_nobody():
    assert run_ranks(4, gradients_there) == [[True] * 3] * 4
    assert torch.equal(draw(TWICE, "1-one-expert").chosen.unique(), torch.tensor([TWICE.num_experts - 1]))
