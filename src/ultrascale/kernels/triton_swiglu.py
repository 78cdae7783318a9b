"""SwiGLU's product, silu(gate) * up, and GPT-OSS's clamped form, in Triton: one pass forward, one backward.

Memory accesses per element: forward 3 (read gate and up, write the product), backward 5 (also write both gradients); 5 and 10
as separate torch kernels. Computes in fp32 and rounds once. Saves gate and up.
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

from ultrascale.kernels.swiglu import CLAMPED_LIMIT, CLAMPED_SLOPE

_BLOCK = 1024
"""Elements per program: 8 per thread of four warps, 16 bytes of bf16, which is one load."""


def swiglu(gate: Tensor, up: Tensor, *, clamped: bool = False) -> Tensor:
    """silu(gate) * up, or `clamped` as `kernels.swiglu.clamped_swiglu`; shapes and dtypes are equal, 16 bits or fp32."""
    return _SwiGLU.apply(gate, up, clamped)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, clamped: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.clamped, out, count = clamped, torch.empty_like(gate), gate.numel()
        if count:
            limit, slope = _limits(clamped)
            _forward[(triton.cdiv(count, _BLOCK),)](gate, up, out, count, limit, slope, CLAMPED=clamped, BLOCK=_BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad, count, (limit, slope) = grads[0].contiguous(), gate.numel(), _limits(ctx.clamped)
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if count:
            _backward[(triton.cdiv(count, _BLOCK),)](
                grad, gate, up, grad_gate, grad_up, count, limit, slope, CLAMPED=ctx.clamped, BLOCK=_BLOCK
            )
        return grad_gate, grad_up, None


def _limits(clamped: bool) -> tuple[float, float]:
    return (CLAMPED_LIMIT, CLAMPED_SLOPE) if clamped else (0.0, 1.0)


@triton.jit
def _at_most(x, limit):
    return tl.where(x > limit, limit, x)  # `minimum` would turn a NaN into a number, and hide a fault


@triton.jit
def _forward(gate, up, out, count, limit, slope, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    if CLAMPED:
        g = _at_most(g, limit)
        u = -_at_most(-_at_most(u, limit), limit) + 1.0
    tl.store(out + place, (g / (1.0 + tl.exp(-slope * g)) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(grad, gate, up, grad_gate, grad_up, count, limit, slope, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    of_out = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    low, shifted = g, u
    if CLAMPED:
        low = _at_most(g, limit)
        shifted = -_at_most(-_at_most(u, limit), limit) + 1.0
    share = 1.0 / (1.0 + tl.exp(-slope * low))
    # d/dx of x sigmoid(a x) is s + a x s (1 - s).
    of_gate = of_out * shifted * (share + slope * low * share * (1.0 - share))
    of_up = of_out * low * share
    if CLAMPED:
        of_gate = tl.where(g > limit, 0.0, of_gate)
        of_up = tl.where(tl.abs(u) > limit, 0.0, of_up)
    tl.store(grad_gate + place, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + place, of_up.to(grad_up.dtype.element_ty), mask=inside)
