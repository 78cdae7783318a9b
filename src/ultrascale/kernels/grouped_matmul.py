"""Grouped GEMM: one GEMM per expert over rows grouped by expert, `out[i] = rows[i] weight[e]^T + bias[e]`.

    rows     e0 e0 e0 | e1 | e3 e3          counts 3 1 0 2: an expert may have no rows
    weight   [X, F, D]                      each group is multiplied by its expert's matrix

In the backward pass the gradient of rows is a grouped GEMM with the same matrices, that of the weights one GEMM per expert,
zero where an expert has no rows. Saves for the backward pass: rows and weight.

torch's `grouped_mm` (2.10 and later) does all groups in one call: on CPU with the same bits as a loop and 1.1 (16 experts of
256 x 128) to 2 times (64 of 128 x 64) as fast, on CUDA without copying the counts to the host. It has no fp64, and rows must be
multiples of 16 bytes; a loop covers the rest, and on CUDA every case where it measured faster (`kernels.choice.fused_contest`):
few large experts keep the device busy while the host waits for the counts. The alternative, padding every expert to the same
number of rows for one batched GEMM, multiplies as many zeros as the experts are uneven.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ultrascale.kernels.choice.implementation import form_of

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT_BYTES = 16
"""Alignment that `grouped_mm` needs of the starts of matrices and the strides of their rows, in bytes."""


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, F] from rows [M, D] grouped by expert, weight [X, F, D] and bias [X, F] of one dtype.

    counts [X] int64 on the same device: rows of each expert; they sum to M.
    """
    return _GroupedLinear.apply(rows, weight, bias, counts)  # pyright: ignore[reportReturnType]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts, ctx.has_bias, ctx.loops = counts, bias is not None, form_of("experts", rows) == "loop"
        out = _rows_by_matrices(rows, weight.transpose(1, 2), counts, ctx.loops)
        # Not in place: selective recomputation may keep the product.
        return out if bias is None else out + bias.repeat_interleave(counts, dim=0, output_size=len(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = _rows_by_matrices(grad, weight, ctx.counts, ctx.loops) if ctx.needs_input_grad[0] else None
        grad_bias = sums_of_groups(grad, ctx.counts) if ctx.has_bias else None
        return grad_rows, _columns_by_rows(grad, rows, ctx.counts, ctx.loops), grad_bias, None


def _rows_by_matrices(rows: Tensor, matrices: Tensor, counts: Tensor, loops: bool) -> Tensor:
    """[M, Q]: each row of [M, P] times the matrix of its group, [X, P, Q]."""
    if not loops and _runs_grouped(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=_ends(counts))
    out = rows.new_empty(len(rows), matrices.shape[2])
    for expert, part in row_groups(counts):
        torch.mm(rows[part], matrices[expert], out=out[part])
    return out


def _columns_by_rows(left: Tensor, right: Tensor, counts: Tensor, loops: bool) -> Tensor:
    """[X, P, Q]: for each group, left^T right of [M, P] and [M, Q]."""
    if not loops and _runs_grouped(left, right):
        return F.grouped_mm(left.t(), right, offs=_ends(counts))
    out = left.new_zeros(len(counts), left.shape[1], right.shape[1])
    for expert, part in row_groups(counts):
        torch.mm(left[part].t(), right[part], out=out[expert])
    return out


def sums_of_groups(rows: Tensor, counts: Tensor) -> Tensor:
    """Sum of each group's rows [M, F], [X, F], as a GEMM with zeros and ones: no atomic additions, X/D of the work."""
    ends = counts.cumsum(0)
    index = torch.arange(len(rows), device=rows.device)
    is_member = (index < ends[:, None]) & (index >= (ends - counts)[:, None])  # [X, M]
    return is_member.to(rows.dtype) @ rows


def _runs_grouped(left: Tensor, right: Tensor) -> bool:
    def aligned(matrix: Tensor) -> bool:
        steps = sorted(matrix.stride()[-2:])
        fits = all(step * matrix.itemsize % ALIGNMENT_BYTES == 0 for step in steps[1:])
        return steps[0] == 1 and fits and matrix.data_ptr() % ALIGNMENT_BYTES == 0

    return left.dtype in GROUPED_DTYPES and left.numel() > 0 and aligned(left) and aligned(right)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def row_groups(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for each expert that has any; on CUDA the host waits for the counts."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, slice(start, start + count)
        start += count
