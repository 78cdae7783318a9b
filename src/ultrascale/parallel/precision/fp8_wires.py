"""fp8 under tensor parallelism: communication, and the scales that ranks agree on so that each rounds its shard to the bits
that one process would produce.

                              tensors whose scale is shared over ranks         communication for it
    column-parallel products  one per tensor: x, W, g; one per row: g (dx)     a max-reduce forward, one backward
    row-parallel product      x and W, per row or per tensor                   a max-reduce forward

One message covers all projections of one input: 4 bytes a tensor, or 4 bytes per token and projection and per feature of W.
Column-parallel products gather x in 8 bits instead of 16, in both passes, and row scales, 4 bytes a token, once. Sums over
ranks stay in 16 bits: partial sums of fp8 products, rounded once more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.fp8.fp8_linear import Wires
from ultrascale.kernels.fp8.fp8_matrices import Narrow, ReduceAmax, Scaling, multiplied
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.tensor.tensor_ops import TensorParallel, gathered_sequence, local_length
from ultrascale.parallel.tensor.tensor_traffic import Finish, all_gather_sequence, sum_sequence
from ultrascale.torch_private import group_named


@custom_op("ultrascale::largest", mutates_args=())
def largest(magnitudes: Tensor, group: str) -> Tensor:
    """Elementwise maximum over ranks."""
    ranks, most = group_named(group), magnitudes.clone()
    with waiting("the largest magnitudes for scales of fp8", ranks):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=ranks)
    return most


@custom_op("ultrascale::scaled_columns", mutates_args=())
def scaled_columns(
    values: Tensor, scale: Tensor, matrices: list[Tensor], scales: list[Tensor], group: str, length: int, dtype: torch.dtype
) -> list[Tensor]:
    """Column-parallel products of [B, S/tp, D] in fp8, with the scales of all its rows, and matrices [F, D]: [B, S, F] each."""
    whole = _gather(values, group, length)()
    rows = whole.flatten(0, 1)
    pairs = zip(matrices, scales, strict=True)
    return [multiplied(rows, scale, *pair, dtype).view(*whole.shape[:2], -1) for pair in pairs]


@custom_op("ultrascale::scaled_columns_backward", mutates_args=())
def scaled_columns_backward(
    along: list[Tensor], along_scales: list[Tensor], matrices: list[Tensor], scales: list[Tensor],
    across: list[Tensor], across_scales: list[Tensor], values: Tensor, scale: Tensor,
    group: str, length: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    """dx [B, S/tp, D], and dW of each of `across`: x is gathered during the GEMM of dx, and dx scattered during that of dW."""
    ranks = group_named(group)
    gathered = _gather(values, group, length) if across else None
    each = zip(along, along_scales, matrices, scales, strict=True)
    grad = multiplied(*next(each), dtype)
    for factors in each:
        grad += multiplied(*factors, dtype)
    grad = grad.view(len(values), -1, values.shape[-1])
    summed = sum_sequence(grad, length, ranks)
    weight_grads = []
    if gathered is not None:
        turned = gathered().flatten(0, 1).t()
        weight_grads = [
            multiplied(values_t, scale_t, turned, scale, dtype) for values_t, scale_t in zip(across, across_scales, strict=True)
        ]
    return [summed(), *weight_grads]


@custom_op("ultrascale::scaled_row", mutates_args=())
def scaled_row(
    values: Tensor, scale: Tensor, matrix: Tensor, matrix_scale: Tensor, group: str, length: int, dtype: torch.dtype
) -> Tensor:
    """Row-parallel product of [B, S, F] in fp8 and a matrix [D, F], summed over ranks: [B, S/tp, D], or [B, S, D] if `length`
    is 0."""
    ranks = group_named(group)
    partial_sum = multiplied(values.flatten(0, 1), scale, matrix, matrix_scale, dtype).view(*values.shape[:2], -1)
    return sum_sequence(partial_sum, length, ranks)()


@largest.register_fake
def _(magnitudes: Tensor, group: str) -> Tensor:
    return torch.empty_like(magnitudes)


@scaled_columns.register_fake
def _(
    values: Tensor, scale: Tensor, matrices: list[Tensor], scales: list[Tensor], group: str, length: int, dtype: torch.dtype
) -> list[Tensor]:
    return [values.new_empty(values.shape[0], length or values.shape[1], len(matrix), dtype=dtype) for matrix in matrices]


@scaled_columns_backward.register_fake
def _(*factors: Any) -> list[Tensor]:
    across, _, values, *_, dtype = factors[4:]
    return [values.new_empty(size, dtype=dtype) for size in (values.shape, *((len(grad), values.shape[-1]) for grad in across))]


@scaled_row.register_fake
def _(
    values: Tensor, scale: Tensor, matrix: Tensor, matrix_scale: Tensor, group: str, length: int, dtype: torch.dtype
) -> Tensor:
    return values.new_empty(values.shape[0], local_length(values.shape[1], group, length), len(matrix), dtype=dtype)


_ops = torch.ops.ultrascale
KEPT_OPS = (_ops.largest.default, _ops.scaled_columns.default, _ops.scaled_row.default)
"""Operations whose results selective recomputation saves: recomputing them would communicate again."""


class Agreed(Wires):
    """Sharded products that communicate only scales: those of experts over expert_tp."""

    def __init__(self, group: str, *, columns: bool):
        self.group, self.columns = group, columns

    def reduce_input_amax(self, scaling: Scaling) -> ReduceAmax | None:
        return None if self.columns and scaling == "row" else partial(largest, group=self.group)

    def reduce_grad_amax(self) -> ReduceAmax | None:
        return partial(largest, group=self.group) if self.columns else None


class ColumnWires(Agreed):
    """Agreement on the scales of column-parallel products over the ranks of `tp`."""

    def __init__(self, tp: TensorParallel):
        super().__init__(tp.group.group_name, columns=True)
        self.length = tp.length

    def scales(self, local_scale: Tensor) -> Tensor:
        whole = gathered_sequence(local_scale, self.group, self.length) if self.length else local_scale
        return whole.view(-1, 1)

    def forward(self, values: Tensor, scale: Tensor, matrices: list[Narrow], dtype: torch.dtype) -> list[Tensor]:
        return scaled_columns(values, scale, *_apart(matrices), self.group, self.length, dtype)

    def backward(
        self, along: list[Narrow], matrices: list[Narrow], across: list[Narrow], waited: Narrow, dtype: torch.dtype
    ) -> list[Tensor]:
        factors = (*_apart(along), *_apart(matrices), *_apart(across))
        return scaled_columns_backward(*factors, *waited, self.group, self.length, dtype)


class RowWires(Agreed):
    """Agreement on the scales of a row-parallel product over the ranks of `tp`."""

    def __init__(self, tp: TensorParallel):
        super().__init__(tp.group.group_name, columns=False)
        self.length = tp.length

    def forward(self, values: Tensor, scale: Tensor, matrices: list[Narrow], dtype: torch.dtype) -> list[Tensor]:
        (matrix,) = matrices
        return [scaled_row(values, scale, *matrix, self.group, self.length, dtype)]

    def gather_grad(self, grad: Tensor) -> Tensor:
        return gathered_sequence(grad, self.group, self.length) if self.length else grad


def gather_later(group: str, length: int) -> Callable[[Tensor], Tensor] | None:
    """Function by which W all-gathers the other ranks' positions of fp8 tensors."""
    return (lambda local_values: _gather(local_values, group, length)()) if length else None


def _gather(values: Tensor, group: str, length: int) -> Finish:
    """All-gather of [B, S/tp, ...] in fp8 to [B, S, ...]. Sent as bytes, so that gloo and NCCL need not support fp8."""
    if not length:
        return lambda: values
    finish = all_gather_sequence(values.view(torch.uint8), length, group_named(group))
    return lambda: finish().view(values.dtype)


def _apart(matrices: list[Narrow]) -> tuple[list[Tensor], list[Tensor]]:
    return [matrix.values for matrix in matrices], [matrix.scale for matrix in matrices]
