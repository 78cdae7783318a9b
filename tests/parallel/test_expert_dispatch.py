"""Experts on several ranks against a formula that knows no ranks, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from parallel.expert_cases import Cut, Outcome, assembled, draw, error, formula, group_of, loss_of, my_dispatch, my_experts
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ultrascale.parallel import all_to_all
from ultrascale.parallel.expert import expert_dispatch
from ultrascale.parallel.expert.expert_dispatch import ExpertDispatch

EXACT = 1e-12


def one_rank(rank: int, cut: Cut, choices: str, recompute: bool = False, fault: str = "") -> Outcome:
    """What this rank computes; the experts' gradients summed over the ranks that hold the same."""
    whole = draw(cut, choices)
    dispatch, experts = my_dispatch(rank, cut), my_experts(rank, cut, whole)
    replicas = group_of(rank, cut.world, cut.world // (cut.ep * cut.expert_tp), cut.ep * cut.expert_tp)
    tokens, weights = (t[rank // cut.same].clone().requires_grad_() for t in (whole.tokens, whole.weights))
    chosen = whole.chosen[rank // cut.same]
    plant(fault, dispatch)
    if fault == "nothing is sent":  # as nanotron's, whose ranks give their own tokens to their own experts
        dispatch, chosen = ExpertDispatch(cut.num_experts // cut.ep), chosen % (cut.num_experts // cut.ep)
    if fault == "experts summed over all ranks":  # pytorch#160285: gradients too large by the number of ranks in ep
        replicas = dist.group.WORLD
    seen = weights.detach() if fault == "router detached" else weights  # Automodel#2995, transformers#48687

    def layer(tokens: Tensor, weights: Tensor) -> Tensor:
        under_way = dispatch.start(tokens, (chosen, weights))
        beside = tokens.square().sum(1, keepdim=True)
        return dispatch.finish(under_way, experts) + 0.0 * beside

    results = checkpoint(layer, tokens, seen, use_reentrant=False) if recompute else layer(tokens, seen)
    assert isinstance(results, Tensor)
    loss_of(results).backward()
    gradients = [p.grad for p in experts.parameters()]
    for gradient in gradients:
        assert gradient is not None
        if replicas is not None:
            dist.all_reduce(gradient, group=replicas)
    router = torch.zeros_like(weights) if weights.grad is None else weights.grad
    return Outcome(results.detach(), tokens.grad, router, *gradients)  # type: ignore[arg-type]


def plant(fault: str, dispatch: ExpertDispatch) -> None:
    """Break this rank's process, which ends with the test."""
    if fault == "tokens not cut over tp":
        dispatch.same_tokens = None
    if fault == "whole sums gradients":
        expert_dispatch.unshard_rows = all_to_all.all_gather
    if fault == "partial products not summed":
        expert_dispatch.reduce_scatter = all_to_all.shard_rows
    if fault == "no gradient comes back":
        all_to_all._Depart.backward = staticmethod(lambda ctx, grad: (torch.zeros_like(ctx.exchange.wait()), None))
    if fault == "results in order of arrival":
        expert_dispatch.put_back = lambda rows, order: rows


def error_of(cut: Cut, choices: str = "2", *options: object) -> float:
    """Of all ranks together, and of those with the same tokens against the first of them."""
    outcomes = run_ranks(cut.world, one_rank, cut, choices, *options)
    copies = [error(Outcome(*o[:3], *outcomes[0][3:]), Outcome(*outcomes[i // cut.same * cut.same][:3], *outcomes[0][3:]))
              for i, o in enumerate(outcomes)]  # fmt: skip
    return max(error(assembled(outcomes, cut), formula(draw(cut, choices))), *copies)


CUTS = {
    "ep2": Cut(2, ep=2),
    "expert_tp2": Cut(2, expert_tp=2),
    "same2": Cut(2, same=2),
    "same2 ep2": Cut(2, ep=2, same=2),
    "same2 expert_tp2": Cut(2, expert_tp=2, same=2),
    "ep3 uneven": Cut(3, ep=3),
    "ep4": Cut(4, ep=4),
    "ep2 of 4": Cut(4, ep=2),
    "ep2 expert_tp2": Cut(4, ep=2, expert_tp=2),
    "expert_tp4": Cut(4, expert_tp=4),
    "same2 ep4": Cut(4, ep=4, same=2),
    "same2 ep2 of 4": Cut(4, ep=2, same=2),
    "same2 ep2 expert_tp2": Cut(4, ep=2, expert_tp=2, same=2),
    "same4 ep2": Cut(4, ep=2, same=4),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_results_and_every_gradient_equal_the_formula(cut):
    assert error_of(cut) < EXACT


@pytest.mark.parametrize("choices", ["1", "4", "2-one-expert", "1-none-for-most", "2-dropped"])
@pytest.mark.parametrize("cut", [CUTS["ep4"], CUTS["same2 ep2 expert_tp2"]], ids=["ep4", "all"])
def test_any_choice_of_experts_is_exact(cut, choices):
    assert error_of(cut, choices) < EXACT


@pytest.mark.parametrize("cut", [CUTS["ep2"], CUTS["same2 ep2 expert_tp2"]], ids=["ep2", "all"])
def test_recomputation_sends_again_and_changes_nothing(cut):
    assert error_of(cut, "2", True) < EXACT


FAULTS = {
    "nothing is sent": CUTS["ep2"],
    "no gradient comes back": CUTS["ep2"],
    "results in order of arrival": CUTS["ep2"],
    "experts summed over all ranks": CUTS["ep2"],
    "router detached": CUTS["ep2"],
    "partial products not summed": CUTS["expert_tp2"],
    "tokens not cut over tp": CUTS["same2"],
    "whole sums gradients": CUTS["same2 ep2"],
}


@pytest.mark.parametrize(("fault", "cut"), FAULTS.items(), ids=FAULTS)
def test_a_planted_fault_is_seen(fault, cut):
    assert error_of(cut, "2", False, fault) > 1e-3


@pytest.mark.catalogue(54)
def test_the_same_run_twice_gives_the_same_bits():
    cut = CUTS["ep2 expert_tp2"]
    first, second = (run_ranks(cut.world, one_rank, cut, "4") for _ in range(2))
    assert all(torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))


def in_bf16(rank: int, cut: Cut) -> tuple[Tensor, torch.dtype, torch.dtype]:
    """Results, and the dtypes of the gradients of tokens and of weights, which are fp32 as a router's are."""
    whole, dispatch = draw(cut, "2"), my_dispatch(rank, cut)
    experts = my_experts(rank, cut, whole).bfloat16()
    tokens = whole.tokens[rank // cut.same].bfloat16().requires_grad_()
    weights = whole.weights[rank // cut.same].float().requires_grad_()
    results = dispatch(tokens, (whole.chosen[rank // cut.same], weights), experts)
    results.sum().backward()
    assert tokens.grad is not None and weights.grad is not None
    return results.detach(), tokens.grad.dtype, weights.grad.dtype


def test_bf16_tokens_meet_fp32_weights():
    cut = CUTS["same2 ep2 expert_tp2"]
    results, *dtypes = run_ranks(cut.world, in_bf16, cut)[0]
    expected = formula(draw(cut, "2")).results[0]
    assert dtypes == [torch.bfloat16, torch.float32]
    assert results.dtype == torch.bfloat16
    assert ((results - expected).abs().max() / expected.abs().max()).item() < 0.02
