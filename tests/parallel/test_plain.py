"""The plain forms of every axis: N ranks compute what one process does, in float64."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from ultrascale.parallel.plain.data import ShardedAdam, sum_gradients
from ultrascale.parallel.plain.expert import expert_layer
from ultrascale.parallel.plain.pipeline import run_schedule
from ultrascale.parallel.plain.ring import ring_attention
from ultrascale.parallel.plain.tensor import FeedForward
from ultrascale.schedules.kinds.afab import afab
from ultrascale.schedules.kinds.one_f_one_b import one_f_one_b

WORLD = 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(found: Tensor | list[Tensor], wanted: Tensor | list[Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def data_rank(rank: int) -> None:
    x, whole = drawn(2 * WORLD, 5), model()
    whole(x).square().mean().backward()
    own = model()
    (own(x[2 * rank : 2 * rank + 2]).square().sum() / len(x)).backward()
    sum_gradients(own.parameters())
    close([p.grad for p in own.parameters()], [p.grad for p in whole.parameters()])  # pyright: ignore


def sharded_rank(rank: int) -> None:
    x, whole, own = drawn(2 * WORLD, 5), model(), model()
    adam = torch.optim.Adam(whole.parameters(), lr=0.1)
    sharded = ShardedAdam(own.parameters(), learning_rate=0.1)
    assert sharded.shard.numel() == -(-sum(p.numel() for p in own.parameters()) // WORLD)
    for _ in range(3):
        adam.zero_grad()
        whole(x).square().mean().backward()
        adam.step()
        (own(x[2 * rank : 2 * rank + 2]).square().sum() / len(x)).backward()
        sharded.step()
    close([p.detach() for p in own.parameters()], [p.detach() for p in whole.parameters()])


def tensor_rank(rank: int) -> None:
    gate, up, down, x = drawn(6, 4), drawn(6, 4, seed=1), drawn(4, 6, seed=2), drawn(2, 3, 4, seed=3)
    wholes = [one.clone().requires_grad_() for one in (gate, up, down, x)]
    made = (nn.functional.silu(wholes[3] @ wholes[0].T) * (wholes[3] @ wholes[1].T)) @ wholes[2].T
    made.square().sum().backward()
    layer, given = FeedForward(gate, up, down), x.clone().requires_grad_()
    found = layer(given)
    found.square().sum().backward()
    close(found.detach(), made.detach())
    parts = [one.grad.chunk(WORLD, dim)[rank] for one, dim in zip(wholes, (0, 0, 1), strict=False)]  # pyright: ignore
    close([layer.gate.weight.grad, layer.up.weight.grad, layer.down.weight.grad], parts)  # pyright: ignore
    close(given.grad, wholes[3].grad)  # pyright: ignore


def ring_rank(rank: int) -> None:
    wholes = [drawn(2, 3, 4 * WORLD, 5, seed=seed).requires_grad_() for seed in range(3)]
    weight = drawn(2, 3, 4 * WORLD, 5, seed=9)
    wanted = nn.functional.scaled_dot_product_attention(*wholes, is_causal=True)  # pyright: ignore
    (wanted * weight).sum().backward()
    own = [one.detach().chunk(WORLD, 2)[rank].clone().requires_grad_() for one in wholes]
    found = ring_attention(*own)
    (found * weight.chunk(WORLD, 2)[rank]).sum().backward()
    close(found.detach(), wanted.detach().chunk(WORLD, 2)[rank])
    close([one.grad for one in own], [one.grad.chunk(WORLD, 2)[rank] for one in wholes])  # pyright: ignore


def pipeline_rank(rank: int, name: str) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(WORLD)]
    own, batches = copy.deepcopy(stages[rank]), [drawn(2, 4, seed=seed) for seed in range(5)]
    wanted = [nn.Sequential(*stages)(batch).square().sum() for batch in batches]
    torch.stack(wanted).sum().backward()
    lists = {"1f1b": one_f_one_b, "afab": afab}[name](WORLD, len(batches))
    losses = run_schedule(lists[rank], own, batches, lambda made, number: made.square().sum(), (2, 4))
    close([p.grad for p in own.parameters()], [p.grad for p in stages[rank].parameters()])  # pyright: ignore
    if rank == WORLD - 1:
        close(torch.tensor(losses, dtype=torch.float64), torch.stack(wanted).detach())


def expert_rank(rank: int) -> None:
    torch.manual_seed(0)
    experts = [nn.Linear(4, 4).double() for _ in range(2 * WORLD)]
    x, chosen = drawn(WORLD, 5, 4), torch.randint(2 * WORLD, (WORLD, 5, 2))
    weights = drawn(WORLD, 5, 2, seed=1)
    whole = x.clone().requires_grad_()
    made = [
        weights[r, t, 0] * experts[chosen[r, t, 0]](whole[r, t]) + weights[r, t, 1] * experts[chosen[r, t, 1]](whole[r, t])
        for r in range(WORLD) for t in range(5)
    ]  # fmt: skip
    wanted = torch.stack(made).view_as(x)
    wanted.square().sum().backward()
    own = [copy.deepcopy(one) for one in experts[2 * rank : 2 * rank + 2]]
    for one in own:
        one.zero_grad()
    given = x[rank].clone().requires_grad_()
    found = expert_layer(given, chosen[rank], weights[rank], own)
    found.square().sum().backward()
    close(found.detach(), wanted[rank].detach())
    close(given.grad, whole.grad[rank])  # pyright: ignore
    for here, there in zip(own, experts[2 * rank : 2 * rank + 2], strict=True):
        close(here.weight.grad, torch.zeros_like(here.weight) if there.weight.grad is None else there.weight.grad)  # pyright: ignore


CASES = {
    "data": data_rank,
    "zero-1": sharded_rank,
    "tensor": tensor_rank,
    "ring": ring_rank,
    "expert": expert_rank,
    "1f1b": partial(pipeline_rank, name="1f1b"),
    "afab": partial(pipeline_rank, name="afab"),
}


@pytest.mark.parametrize("rank_does", CASES.values(), ids=CASES)
def test_ranks_compute_what_one_process_does(rank_does):
    run_ranks(WORLD, rank_does)
