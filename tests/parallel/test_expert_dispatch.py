"""Experts on several ranks against a formula that knows no ranks, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ultrascale.parallel import all_to_all, expert_dispatch
from ultrascale.parallel.expert_dispatch import Dispatch
from ultrascale.spec.places import even_part

D, WIDTH, TOKENS = 6, 10, 7
EXACT = 1e-12


@dataclass(frozen=True)
class Cut:
    """`ep` x `expert_tp` neighbouring ranks hold the experts once. `same`: neighbouring ranks with the same tokens."""

    world: int
    ep: int = 1
    expert_tp: int = 1
    same: int = 1
    num_experts: int = 8


class Tensors(NamedTuple):
    """Whole tensors: tokens [groups of ranks with the same, N, D], choices and weights [.., N, k], and the experts'."""

    tokens: Tensor
    chosen: Tensor
    weights: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Outcome(NamedTuple):
    """Results [.., N, D] and the gradients of what was given."""

    results: Tensor
    tokens: Tensor
    weights: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def draw(cut: Cut, choices: str) -> Tensors:
    """`choices`: how many experts a token visits, and after a dash a peculiarity."""
    torch.manual_seed(1)
    count, shape = int(choices[0]), (cut.world // cut.same, TOKENS)
    chosen = torch.rand(*shape, cut.num_experts).argsort(-1)[..., :count]
    if choices.endswith("one-expert"):
        chosen = torch.full_like(chosen, cut.num_experts - 1)
    if choices.endswith("none-for-most"):
        chosen = chosen % 2
    if choices.endswith("dropped"):
        chosen = chosen.masked_fill(torch.rand(chosen.shape) < 0.4, cut.num_experts)
        chosen[0] = cut.num_experts
    weights = torch.rand(*shape, count, dtype=torch.float64).masked_fill(chosen == cut.num_experts, 0.0)
    up, gate = torch.randn(2, cut.num_experts, WIDTH, D, dtype=torch.float64)
    down = torch.randn(cut.num_experts, D, WIDTH, dtype=torch.float64)
    return Tensors(torch.randn(*shape, D, dtype=torch.float64), chosen, weights, gate, up, down)


def loss_of(results: Tensor) -> Tensor:
    """Its derivative differs from element to element."""
    return (results * torch.linspace(-1.0, 1.0, results.numel(), dtype=results.dtype).view_as(results)).sum()


def formula(whole: Tensors) -> Outcome:
    """Every token's chosen experts, pair by pair."""
    leaves = {name: t.clone().requires_grad_() for name, t in whole._asdict().items() if name != "chosen"}
    is_kept = (whole.chosen < len(whole.gate))[..., None]
    chosen, tokens = whole.chosen.clamp(max=len(whole.gate) - 1), leaves["tokens"]
    inner = F.silu(torch.einsum("gnd,gnkfd->gnkf", tokens, leaves["gate"][chosen]))
    inner = inner * torch.einsum("gnd,gnkfd->gnkf", tokens, leaves["up"][chosen])
    results = torch.einsum("gnkf,gnkdf->gnkd", inner, leaves["down"][chosen]) * leaves["weights"][..., None]
    results = (results * is_kept).sum(2)
    sum(loss_of(one) for one in results).backward()  # type: ignore[union-attr]
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    gradients["weights"] = gradients["weights"] * is_kept[..., 0]  # type: ignore[index]
    return Outcome(results.detach(), **gradients)  # type: ignore[arg-type]


class Experts(nn.Module):
    """A rank's part of the experts' weights, one expert after the other."""

    def __init__(self, whole: Tensors, experts: slice, width: slice):
        super().__init__()
        self.gate = nn.Parameter(whole.gate[experts, width].clone())
        self.up = nn.Parameter(whole.up[experts, width].clone())
        self.down = nn.Parameter(whole.down[experts, :, width].clone())

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        inner = [F.silu(x @ g.T) * (x @ u.T) for x, g, u in zip(parts, self.gate, self.up, strict=True)]
        return torch.cat([x @ d.T for x, d in zip(inner, self.down, strict=True)])


def group_of(rank: int, world: int, size: int, stride: int) -> dist.ProcessGroup | None:
    """Mine of the groups of `size` ranks that are `stride` apart."""
    mine = None
    for first in [r for r in range(world) if r // stride % size == 0]:
        members = [first + step * stride for step in range(size)]
        group = dist.new_group(members) if size > 1 else None
        mine = group if rank in members else mine
    assert not isinstance(mine, int)
    return mine


def part(length: int, parts: int, index: int) -> slice:
    first, size = even_part(length, parts, index)
    return slice(first, first + size)


def my_experts(rank: int, cut: Cut, whole: Tensors) -> Experts:
    width = part(WIDTH, cut.expert_tp, rank % cut.expert_tp)
    return Experts(whole, part(cut.num_experts, cut.ep, rank // cut.expert_tp % cut.ep), width)


def my_dispatch(rank: int, cut: Cut) -> Dispatch:
    return Dispatch(
        cut.num_experts,
        ep=group_of(rank, cut.world, cut.ep, cut.expert_tp),
        expert_tp=group_of(rank, cut.world, cut.expert_tp, 1),
        same_tokens=group_of(rank, cut.world, cut.same, 1),
    )


def one_rank(rank: int, cut: Cut, choices: str, recompute: bool = False, fault: str = "") -> Outcome:
    """What this rank computes; the experts' gradients summed over the ranks that hold the same."""
    whole = draw(cut, choices)
    dispatch, experts = my_dispatch(rank, cut), my_experts(rank, cut, whole)
    replicas = group_of(rank, cut.world, cut.world // (cut.ep * cut.expert_tp), cut.ep * cut.expert_tp)
    tokens, weights = (t[rank // cut.same].clone().requires_grad_() for t in (whole.tokens, whole.weights))
    chosen = whole.chosen[rank // cut.same]
    plant(fault, dispatch)
    if fault == "nothing is sent":  # as nanotron's, whose ranks give their own tokens to their own experts
        dispatch, chosen = Dispatch(cut.num_experts // cut.ep), chosen % (cut.num_experts // cut.ep)
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


def plant(fault: str, dispatch: Dispatch) -> None:
    """Break this rank's process, which ends with the test."""
    if fault == "tokens not cut over tp":
        dispatch.same_tokens = None
    if fault == "whole sums gradients":
        expert_dispatch.whole = all_to_all.gather
    if fault == "partial products not summed":
        expert_dispatch.sum_scatter = all_to_all.cut
    if fault == "no gradient comes back":
        all_to_all._Depart.backward = staticmethod(lambda ctx, grad: (torch.zeros_like(ctx.exchange.wait()), None))
    if fault == "results in order of arrival":
        expert_dispatch.put_back = lambda rows, order: rows


def assembled(outcomes: list[Outcome], cut: Cut) -> Outcome:
    """One outcome of all ranks': tokens of the first of those that hold the same, experts of the first that hold them."""
    tokens = [torch.stack([o[i] for o in outcomes[:: cut.same]]) for i in range(3)]
    plane = outcomes[: cut.ep * cut.expert_tp]
    experts = []
    for i, dim in ((3, 1), (4, 1), (5, 2)):
        rows = [torch.cat([o[i] for o in plane[e * cut.expert_tp :][: cut.expert_tp]], dim) for e in range(cut.ep)]
        experts.append(torch.cat(rows))
    return Outcome(*tokens, *experts)


def error(got: Outcome, expected: Outcome) -> float:
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(got, expected, strict=True))


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


def test_the_same_run_twice_gives_the_same_bits():
    cut = CUTS["ep2 expert_tp2"]
    first, second = (run_ranks(cut.world, one_rank, cut, "4") for _ in range(2))
    assert all(torch.equal(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True))
