"""Tensor parallelism (Shoeybi et al. 2019): the first weight of a pair is sharded by columns, the second by rows.

    x ── copy ──> x W1[:, own] ── activation ──> y W2[own, :] ── reduce ──> sum over ranks
         backward: sum                                             backward: copy

Nothing is sent between the two: an activation function works on each column alone. Attention is sharded the same way, by heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Copy(torch.autograd.Function):
    """Every rank uses the same tensor: its gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Identity."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Sum over ranks."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduce(torch.autograd.Function):
    """Every rank has one summand: each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sum over ranks."""
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Identity of the gradient."""
        return gradient


class ColumnParallel(nn.Module):
    """y = x W^T, of which this rank computes some columns: `weight` is [out / ranks, in]."""

    def __init__(self, whole: Tensor):
        super().__init__()
        self.weight = nn.Parameter(whole.detach().chunk(dist.get_world_size(), 0)[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> this rank's columns [..., out / ranks]."""
        return Copy.apply(x) @ self.weight.T  # pyright: ignore[reportOptionalOperand]


class RowParallel(nn.Module):
    """y = x W^T as a sum over ranks: this rank multiplies its columns of x; `weight` is [out, in / ranks]."""

    def __init__(self, whole: Tensor):
        super().__init__()
        self.weight = nn.Parameter(whole.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())

    def forward(self, x: Tensor) -> Tensor:
        """Row-parallel product of this rank's columns [..., in / ranks]: y [..., out], equal on every rank."""
        return Reduce.apply(x @ self.weight.T)  # pyright: ignore[reportReturnType]


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), sharded over ranks from whole weights [F, D], [F, D] and [D, F]."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor):
        super().__init__()
        self.gate, self.up, self.down = ColumnParallel(gate), ColumnParallel(up), RowParallel(down)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]; all-reduces: one forward, and one backward for each column-parallel product."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))
