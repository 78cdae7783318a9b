"""The order of rows around experts: a row for every (token, expert) pair, in the order of experts, and back.

    tokens [N, D] --- spread ---> rows [R, D] --- experts ---> rows [R, D] --- weighted_sum ---> [N, D]

R is N k less the pairs that were dropped. Pair p = n k + j is the j-th choice of token n; `pairs` [R] says which pair each row
is. Gradients are sums of k rows in the order of choices, never atomic additions, so that they are the same bits every time.
Saved for the backward pass: `pairs` and, by `weighted_sum` alone, the rows in their own dtype and the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def spread(tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
    """The token of each pair: of [N, D] and `pairs` [R] int64, [R, D]."""
    return _Spread.apply(tokens, pairs, choices)  # pyright: ignore[reportReturnType]


def weighted_sum(rows: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
    """Each token's rows [R, D], summed by `weights` [N, k] in fp32 (fp64 in fp64), in the rows' dtype: [N, D]."""
    return _WeightedSum.apply(rows, pairs, weights)  # pyright: ignore[reportReturnType]


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """[R, D] in another order: row i is what was row `order[i]`."""
    return _Reorder.apply(rows, order)  # pyright: ignore[reportReturnType]


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    """The inverse of `reorder`: row `order[i]` is what was row i."""
    return _PutBack.apply(rows, order)  # pyright: ignore[reportReturnType]


def order_by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """Of rows that lie by source and within it by expert, counts [..., X], the order by expert and within it by source."""
    local = torch.arange(counts.shape[-1], device=counts.device).expand_as(counts).flatten()
    return local.repeat_interleave(counts.flatten(), output_size=num_rows).argsort(stable=True)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.num_tokens, ctx.choices = len(tokens), choices
        return tokens.index_select(0, pairs // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (pairs,) = ctx.saved_tensors
        return _by_token(grad, pairs, ctx.num_tokens, ctx.choices).sum(1), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, pairs, weights)
        wide = torch.promote_types(rows.dtype, torch.float32)
        found, total = _by_token(rows, pairs, *weights.shape), rows.new_zeros(len(weights), rows.shape[1], dtype=wide)
        for choice in range(weights.shape[1]):
            total += found[:, choice] * weights[:, choice, None].to(wide)
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, pairs, weights = ctx.saved_tensors
        wide = torch.promote_types(rows.dtype, torch.float32)
        of_row = grad.index_select(0, pairs // weights.shape[1]).to(wide)  # [R, D]
        of_weights = weights.new_zeros(weights.numel(), dtype=wide).index_copy_(0, pairs, (of_row * rows).sum(1))
        of_rows = of_row.mul_(weights.flatten().index_select(0, pairs)[:, None])
        return of_rows.to(rows.dtype), None, of_weights.view_as(weights).to(weights.dtype)


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


def _by_token(rows: Tensor, pairs: Tensor, num_tokens: int, choices: int) -> Tensor:
    """[N, k, D]; zeros where a pair was dropped."""
    return rows.new_zeros(num_tokens * choices, rows.shape[1]).index_copy_(0, pairs, rows).unflatten(0, (num_tokens, choices))
