"""Small experts cut over ranks, and the formula that knows no ranks, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ultrascale.parallel.expert.expert_dispatch import ExpertDispatch
from ultrascale.work.sharding.places import even_part

D, WIDTH, TOKENS = 6, 10, 7


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


def my_dispatch(rank: int, cut: Cut) -> ExpertDispatch:
    return ExpertDispatch(
        cut.num_experts,
        ep=group_of(rank, cut.world, cut.ep, cut.expert_tp),
        expert_tp=group_of(rank, cut.world, cut.expert_tp, 1),
        same_tokens=group_of(rank, cut.world, cut.same, 1),
    )


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
