"""fp8 beside tensor parallelism: what ranks send, and which scales they agree on, so that each rounds what it holds to the bits
that one process would.

                       what has one scale and is cut                    what is sent for it
    column products    one a tensor: x, W, g; one a row: g (dx)         a maximum forward, one backward
    row product        x and W, a row or a tensor                       a maximum forward

A message is of all projections of one input: 4 bytes a tensor, or 4 bytes a token and projection and a feature of W. Of x the
column products gather 8 bits instead of 16, in both passes, and scales of rows, 4 bytes a token, once. What is summed over
ranks stays in 16 bits: partial sums of rounded numbers, rounded once more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.fp8.fp8_linear import Wires
from ultrascale.kernels.fp8.fp8_matrices import Narrow, Over, Scaling, multiplied
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.tensor.tensor_ops import Cut, gathered_sequence, own_length
from ultrascale.parallel.tensor.tensor_traffic import Finish, gather_parts, sum_parts, sum_whole
from ultrascale.torch_private import group_named


@custom_op("ultrascale::largest", mutates_args=())
def largest(found: Tensor, group: str) -> Tensor:
    """The largest of each number over ranks."""
    ranks, most = group_named(group), found.clone()
    with waiting("the largest magnitudes for scales of fp8", ranks):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=ranks)
    return most


@custom_op("ultrascale::scaled_columns", mutates_args=())
def scaled_columns(
    values: Tensor, scale: Tensor, matrices: list[Tensor], scales: list[Tensor], group: str, length: int, dtype: torch.dtype
) -> list[Tensor]:
    """[B, S/tp, D] in fp8, scales of all its rows, and matrices [F, D] to [B, S, F] each."""
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
    """dx [B, S/tp, D] and dW of each of `across`: x travels during dx, and dx during dW."""
    ranks = group_named(group)
    gathered = _gather(values, group, length) if across else None
    each = zip(along, along_scales, matrices, scales, strict=True)
    grad = multiplied(*next(each), dtype)
    for factors in each:
        grad += multiplied(*factors, dtype)
    grad = grad.view(len(values), -1, values.shape[-1])
    summed = sum_parts(grad, ranks) if length else sum_whole(grad, ranks)
    found = []
    if gathered is not None:
        turned = gathered().flatten(0, 1).t()
        found = [multiplied(one, its, turned, scale, dtype) for one, its in zip(across, across_scales, strict=True)]
    return [summed(), *found]


@custom_op("ultrascale::scaled_row", mutates_args=())
def scaled_row(
    values: Tensor, scale: Tensor, matrix: Tensor, matrix_scale: Tensor, group: str, length: int, dtype: torch.dtype
) -> Tensor:
    """[B, S, F] in fp8 and a matrix [D, F] to the sum over ranks, [B, S/tp, D], or [B, S, D] where `length` is 0."""
    ranks = group_named(group)
    partial_sum = multiplied(values.flatten(0, 1), scale, matrix, matrix_scale, dtype).view(*values.shape[:2], -1)
    return (sum_parts(partial_sum, ranks) if length else sum_whole(partial_sum, ranks))()


@largest.register_fake
def _(found: Tensor, group: str) -> Tensor:
    return torch.empty_like(found)


@scaled_columns.register_fake
def _(
    values: Tensor, scale: Tensor, matrices: list[Tensor], scales: list[Tensor], group: str, length: int, dtype: torch.dtype
) -> list[Tensor]:
    return [values.new_empty(values.shape[0], length or values.shape[1], len(one), dtype=dtype) for one in matrices]


@scaled_columns_backward.register_fake
def _(
    along: list[Tensor], along_scales: list[Tensor], matrices: list[Tensor], scales: list[Tensor],
    across: list[Tensor], across_scales: list[Tensor], values: Tensor, scale: Tensor,
    group: str, length: int, dtype: torch.dtype,
) -> list[Tensor]:  # fmt: skip
    return [values.new_empty(size, dtype=dtype) for size in (values.shape, *((len(one), values.shape[-1]) for one in across))]


@scaled_row.register_fake
def _(
    values: Tensor, scale: Tensor, matrix: Tensor, matrix_scale: Tensor, group: str, length: int, dtype: torch.dtype
) -> Tensor:
    return values.new_empty(values.shape[0], own_length(values.shape[1], group, length), len(matrix), dtype=dtype)


_ops = torch.ops.ultrascale
KEPT_OPS = (_ops.largest.default, _ops.scaled_columns.default, _ops.scaled_row.default)
"""Operations whose results selective recomputation keeps: computing these again would send messages again."""


class Agreed(Wires):
    """Products of which ranks hold parts and send nothing but scales: of experts over expert_tp."""

    def __init__(self, group: str, *, columns: bool):
        self.group, self.columns = group, columns

    def over_inputs(self, scaling: Scaling) -> Over | None:
        return None if self.columns and scaling == "row" else partial(largest, group=self.group)

    def over_grads(self) -> Over | None:
        return partial(largest, group=self.group) if self.columns else None


class Columns(Agreed):
    """Agreement on the scales of column-parallel products over the ranks of `cut`."""

    def __init__(self, cut: Cut):
        super().__init__(cut.group.group_name, columns=True)
        self.length = cut.length

    def scales(self, own: Tensor) -> Tensor:
        whole = gathered_sequence(own, self.group, self.length) if self.length else own
        return whole.view(-1, 1)

    def forward(self, values: Tensor, scale: Tensor, matrices: list[Narrow], dtype: torch.dtype) -> list[Tensor]:
        return scaled_columns(values, scale, *_apart(matrices), self.group, self.length, dtype)

    def backward(
        self, along: list[Narrow], matrices: list[Narrow], across: list[Narrow], waited: Narrow, dtype: torch.dtype
    ) -> list[Tensor]:
        every = (*_apart(along), *_apart(matrices), *_apart(across))
        return scaled_columns_backward(*every, *waited, self.group, self.length, dtype)


class Row(Agreed):
    """Agreement on the scales of a row-parallel product over the ranks of `cut`."""

    def __init__(self, cut: Cut):
        super().__init__(cut.group.group_name, columns=False)
        self.length = cut.length

    def forward(self, values: Tensor, scale: Tensor, matrices: list[Narrow], dtype: torch.dtype) -> list[Tensor]:
        (matrix,) = matrices
        return [scaled_row(values, scale, *matrix, self.group, self.length, dtype)]

    def whole(self, grad: Tensor) -> Tensor:
        return gathered_sequence(grad, self.group, self.length) if self.length else grad


def gather_later(group: str, length: int) -> Callable[[Tensor], Tensor] | None:
    """Function by which W all-gathers the other ranks' positions of tensors in fp8."""
    return (lambda own: _gather(own, group, length)()) if length else None


def _gather(values: Tensor, group: str, length: int) -> Finish:
    """[B, S/tp, ...] in fp8 of every rank to [B, S, ...]. They travel as bytes: gloo and NCCL need not know what these mean."""
    if not length:
        return lambda: values
    finish = gather_parts(values.view(torch.uint8), length, group_named(group))
    return lambda: finish().view(values.dtype)


def _apart(matrices: list[Narrow]) -> tuple[list[Tensor], list[Tensor]]:
    return [one.values for one in matrices], [one.scale for one in matrices]
