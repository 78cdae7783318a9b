"""Ring attention (Liu et al. 2023): a sequence is sharded over ranks, and keys and values travel around a ring of them.

Softmax over parts of the keys combines exactly: with m = max(m1, m2) of the rows' largest scores, sums and outputs of the two
parts are scaled by exp(m1 - m) and exp(m2 - m) and added (Milakov and Gimelshein 2018). A causal mask by global positions gives
the last rank most of the work; `parallel.context` uses zigzag order and overlaps its messages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Shift(torch.autograd.Function):
    """Sends a tensor to the previous rank and receives the next rank's; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The next rank's tensor."""
        return _exchange(x, to=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradient from the previous rank."""
        return _exchange(gradient, to=1)


def _exchange(x: Tensor, *, to: int) -> Tensor:
    rank, world, arrived = dist.get_rank(), dist.get_world_size(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.P2POp(dist.isend, x.contiguous(), (rank + to) % world)
    received = dist.P2POp(dist.irecv, arrived, (rank - to) % world)
    for work in dist.batch_isend_irecv([sent, received] if world > 1 else []):
        work.wait()
    return arrived if world > 1 else x


def ring_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of this rank's chunk of each sequence, [B, H, S / ranks, E]; rank r holds the r-th chunk."""
    rank, world, length = dist.get_rank(), dist.get_world_size(), query.shape[2]
    rows = torch.arange(length)[:, None] + rank * length
    largest = query.new_full(query.shape[:3], -torch.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(query)
    for hop in range(world):
        columns = torch.arange(length) + (rank + hop) % world * length
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(columns > rows, -torch.inf)
        highest = torch.maximum(largest, scores.amax(-1).detach())
        safe = highest.masked_fill(highest == -torch.inf, 0)  # a row that has seen no key yet
        weights, rescale = (scores - safe[..., None]).exp(), (largest - safe).exp()
        total = total * rescale + weights.sum(-1)
        out = out * rescale[..., None] + weights @ value
        largest = highest
        if hop < world - 1:
            key, value = Shift.apply(key), Shift.apply(value)  # pyright: ignore[reportAssignmentType]
    return out / total[..., None]
