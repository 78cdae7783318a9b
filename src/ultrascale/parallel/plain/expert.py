"""Expert parallelism (Lepikhin et al. 2021): each rank has some experts; tokens travel to theirs, and results travel back.

    rows of tokens, in the order of their experts ── all-to-all ──> the experts' rank ── experts ──> all-to-all ──> weighted sum

Ranks first exchange the row counts. In the backward pass each of the two exchanges is the other's reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class AllToAll(torch.autograd.Function):
    """Sends `sent[r]` rows, in order, to rank r, which receives them ordered by source rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """[sum(sent), D] -> [sum(received), D]."""
        ctx.counts = received, sent
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The reverse exchange."""
        return AllToAll.apply(gradient, *ctx.counts), None, None  # pyright: ignore[reportReturnType]


def expert_layer(x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[nn.Module]) -> Tensor:
    """Sum over each token's `chosen` experts of `weights` times the expert's output.

    x [T, D]; chosen [T, k], expert numbers over all ranks; weights [T, k]. `experts`: this rank's, in order of their numbers;
    every rank has equally many.
    """
    world, num_local = dist.get_world_size(), len(experts)
    order = chosen.flatten().argsort(stable=True)
    tokens = order // chosen.shape[1]
    sent = torch.bincount(chosen.flatten(), minlength=world * num_local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)  # [rank, expert here]: how many rows each rank has for each expert of this one
    to_ranks, from_ranks = sent.view(world, num_local).sum(1).tolist(), received.view(world, num_local).sum(1).tolist()
    arrived: Tensor = AllToAll.apply(x[tokens], to_ranks, from_ranks)  # pyright: ignore[reportAssignmentType]
    owner = torch.arange(num_local).repeat(world).repeat_interleave(received)
    outputs = torch.zeros_like(arrived)
    for number, expert in enumerate(experts):
        rows = (owner == number).nonzero().flatten()
        outputs = outputs.index_add(0, rows, expert(arrived[rows]))
    back: Tensor = AllToAll.apply(outputs, from_ranks, to_ranks)  # pyright: ignore[reportAssignmentType]
    return torch.zeros_like(x).index_add(0, tokens, back * weights.flatten()[order, None])
