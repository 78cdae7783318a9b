"""The order of rows that came from several ranks: by source and within it by expert, and next to each other by expert.

    arrived      rank 0: e0 e0 e1 | rank 1: e0 e1 e1 e1            counts [[2, 1], [1, 3]]
    by expert    e0 e0 e0 e1 e1 e1 e1                              within an expert still by source

A permutation's derivative is its inverse: rows are copied there and back, and nothing is added up. Saved for the backward pass:
the order, 8 bytes a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def order_by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """Indices that bring rows that lie by source and within it by expert, counts [..., X], into the order of experts, [R]
    int64."""
    expert = torch.arange(counts.shape[-1], device=counts.device).expand_as(counts).flatten()
    return expert.repeat_interleave(counts.flatten(), output_size=num_rows).argsort(stable=True)


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """[R, D] in another order: row i is what was row `order[i]`."""
    return _Reorder.apply(rows, order)  # pyright: ignore[reportReturnType]


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    """The inverse of `reorder`: row `order[i]` is what was row i."""
    return _PutBack.apply(rows, order)  # pyright: ignore[reportReturnType]


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(grad).index_copy_(0, ctx.saved_tensors[0], grad), None


class _PutBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None
