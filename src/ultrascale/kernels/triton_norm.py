"""RMSNorm in Triton, alone or fused with a residual add: the residual stream and the added tensor are read once.

    forward     a program handles a row: sum (if any), mean square, y = x / rms(x) * weight; saves 1/rms, one fp32 per row
    backward    a program handles several rows, one after the other, and accumulates its part of the weight's gradient in
                registers; torch sums the parts [programs, D] in a fixed order: the same bits every time

Memory accesses per element: forward 2 (with a sum 4), backward 3 (4), and nothing else. Computes in fp32. Saves x (or the sum),
the weight and 1/rms. A row must fit a program's registers: D up to 2^14 elements.
"""

# What `triton.jit` makes of a function has no types, and triton need not be installed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels.norm import LARGEST_ROW
from ultrascale.kernels.triton_launch import warps_for

_PROGRAMS = 512
"""Most programs in the backward pass: a few per multiprocessor of an H100 (132) or B200 (148)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D], times weight [D]; the result has the dtype of x. 16 bits or fp32."""
    return _Norm.apply(x, None, weight, eps)[0]  # pyright: ignore[reportOptionalSubscript]


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + added), x + added), both [..., D] in the dtype of x."""
    return _Norm.apply(x, added, weight, eps)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        x, weight = x.contiguous(), weight.contiguous()
        columns, rows = x.shape[-1], x.numel() // x.shape[-1]
        assert columns <= LARGEST_ROW, f"rows of {columns} do not fit a program"
        out, inverse_rms = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
        total = x if added is None else torch.empty_like(x)
        if rows:
            _forward[(rows,)](
                x, x if added is None else added.contiguous(), weight, out, total, inverse_rms, columns, eps,
                ADDS=added is not None, **_size(columns),
            )  # fmt: skip
        ctx.save_for_backward(total, weight, inverse_rms)
        ctx.adds = added is not None
        return out, None if added is None else total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = torch.zeros_like(x) if grads[0] is None else grads[0].contiguous()
        beside = grads[1].contiguous() if ctx.adds and grads[1] is not None else None
        rows, columns = len(inverse_rms), x.shape[-1]
        programs = max(1, min(rows, _PROGRAMS))
        grad_x, shares = torch.empty_like(x), x.new_empty(programs, columns, dtype=torch.float32)
        _backward[(programs,)](
            grad, grad if beside is None else beside, x, weight, inverse_rms, grad_x, shares, rows, columns,
            -(-rows // programs), ADDS=beside is not None, **_size(columns),
        )  # fmt: skip
        return grad_x, grad_x if ctx.adds else None, shares.sum(0).to(weight.dtype), None


def _size(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": warps_for(block)}


@triton.jit
def _forward(
    x, added, weight, out, total, inverse_rms, columns, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    place = row * columns + offsets
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        # Rounded as a separate sum would be: the norm and the residual stream use the same numbers.
        summed = (wide + tl.load(added + place, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, summed, mask=inside)
        wide = summed.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / columns + eps)
    tl.store(inverse_rms + row, inverse)
    scale = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (wide * inverse * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad, beside, x, weight, inverse_rms, grad_x, shares, rows, columns, rows_each, ADDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    scale = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    share = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program * rows_each, tl.minimum(program * rows_each + rows_each, rows)):
        place = row * columns + offsets
        inverse = tl.load(inverse_rms + row)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse
        of_out = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        share += of_out * normed
        of_normed = of_out * scale
        along = tl.sum(of_normed * normed, axis=0) / columns
        of_x = (of_normed - normed * along) * inverse
        if ADDS:
            of_x += tl.load(beside + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + place, of_x.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(shares + program * columns + offsets, share, mask=inside)
