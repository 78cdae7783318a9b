"""Reorders rows received from several ranks: from (source, expert) order into expert order.

    received     rank 0: e0 e0 e1 | rank 1: e0 e1 e1 e1            counts [[2, 1], [1, 3]]
    by expert    e0 e0 e0 e1 e1 e1 e1                              within an expert still by source

The gradient of a permutation is its inverse: rows are copied there and back, and nothing is summed. Saved for the backward
pass: the order, 8 bytes a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def order_by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """Indices [R] int64 that reorder rows from (source, expert) order, with counts [..., X], into expert order."""
    expert = torch.arange(counts.shape[-1], device=counts.device).expand_as(counts).flatten()
    return expert.repeat_interleave(counts.flatten(), output_size=num_rows).argsort(stable=True)


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """Permute rows [R, D]: row i of the result is row `order[i]`."""
    return _Permuted.apply(rows, order, False)  # pyright: ignore[reportReturnType]


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    """Inverse of `reorder`: row `order[i]` of the result is row i."""
    return _Permuted.apply(rows, order, True)  # pyright: ignore[reportReturnType]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return _permuted(rows, order, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _permuted(grad, ctx.saved_tensors[0], not ctx.back), None, None


def _permuted(rows: Tensor, order: Tensor, back: bool) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows) if back else rows.index_select(0, order)
