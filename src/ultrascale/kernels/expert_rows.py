"""Token rows of experts: one row for every (token, expert) pair, grouped by expert, and the weighted sum back.

    tokens [N, D] --- spread ---> rows [R, D] --- experts ---> rows [R, D] --- weighted_sum ---> [N, D]

R is N k less the dropped pairs. Pair p = n k + j is the j-th choice of token n; `pairs` [R] holds each row's pair. Gradients
sum k rows in the order of choices, without atomic additions, so that their bits are reproducible. Saved for the backward pass:
`pairs`, and in `weighted_sum` the rows in their own dtype and the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels.choice.wide import wide_dtype


def spread(tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
    """Row of each pair's token: [N, D] and `pairs` [R] int64 to [R, D]."""
    return _Spread.apply(tokens, pairs, choices)  # pyright: ignore[reportReturnType]


def weighted_sum(rows: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
    """Sum of each token's rows [R, D] with `weights` [N, k], in fp32 (fp64 in fp64), returned in the rows' dtype: [N, D]."""
    return _WeightedSum.apply(rows, pairs, weights)  # pyright: ignore[reportReturnType]


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
        rows = _row_of_pair(pairs, ctx.num_tokens, ctx.choices)
        return _sum_choices(grad, rows, None).to(grad.dtype), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, pairs, weights)
        return _sum_choices(rows, _row_of_pair(pairs, *weights.shape), weights).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, pairs, weights = ctx.saved_tensors
        wide = wide_dtype(rows)
        of_row = grad.index_select(0, pairs // weights.shape[1]).to(wide)  # [R, D]
        of_weights = weights.new_zeros(weights.numel(), dtype=wide)
        of_weights.index_copy_(0, pairs, torch.linalg.vecdot(of_row, rows.to(wide)))
        of_rows = of_row.mul_(weights.flatten().index_select(0, pairs)[:, None])
        return of_rows.to(rows.dtype), None, of_weights.view_as(weights).to(weights.dtype)


def _row_of_pair(pairs: Tensor, num_tokens: int, choices: int) -> Tensor:
    """Row index of each token's choices, [N, k]; R if one was dropped."""
    rows = pairs.new_full((num_tokens * choices,), len(pairs))
    rows[pairs] = torch.arange(len(pairs), device=pairs.device)
    return rows.view(num_tokens, choices)


def _sum_choices(rows: Tensor, row_of_pair: Tensor, weights: Tensor | None) -> Tensor:
    """Sum of each token's rows, [N, D] in fp32 or wider, added one choice after the other."""
    wide = wide_dtype(rows)
    num_tokens, choices = row_of_pair.shape
    if len(rows) < row_of_pair.numel():  # dropped pairs add zeros
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    total = torch.zeros(num_tokens, rows.shape[1], dtype=wide, device=rows.device)
    for choice in range(choices):
        choice_rows = rows.index_select(0, row_of_pair[:, choice])
        if weights is None:
            total += choice_rows
        else:
            total.addcmul_(choice_rows.to(wide), weights[:, choice, None].to(wide))
    return total
