"""SwiGLU's product, silu(gate) * up (Shazeer 2020), GPT-OSS's clamped form, and GeGLU's, gelu(gate) * up.

Saves for the backward pass: gate and up. Plain autograd also saves silu(gate), half as much again of a block's widest
activation; recomputing it costs one pass over memory. `kernels.triton_swiglu` does the same in one pass per direction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.choice.implementation import form_of

CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0
"""GPT-OSS's `swiglu_alpha` (with it x sigmoid(alpha x) is close to GELU) and `swiglu_limit`."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; shapes and dtypes are equal."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    if form_of("swiglu", gate) == "triton":
        return _by_triton(gate, up, clamped=False)
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType]


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate) with gate at most 7 and up from -7 to 7 (GPT-OSS); shapes and dtypes are equal."""
    if torch.compiler.is_compiling():
        gate, up = gate.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(CLAMPED_SLOPE * gate))
    if form_of("swiglu", gate) == "triton":
        return _by_triton(gate, up, clamped=True)
    return _ClampedSwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType]


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, by tanh (Gemma); shapes and dtypes are equal."""
    if torch.compiler.is_compiling():
        return F.gelu(gate, approximate="tanh") * up
    return _GeGLU.apply(gate, up)  # pyright: ignore[reportReturnType]


def _by_triton(gate: Tensor, up: Tensor, *, clamped: bool) -> Tensor:
    from ultrascale.kernels import triton_swiglu  # here: Triton need not be installed

    return triton_swiglu.swiglu(gate, up, clamped=clamped)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        grad_up = F.silu(gate).mul_(grads[0])
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, grad_up


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        grad_up = F.gelu(gate, approximate="tanh").mul_(grads[0])
        return torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate="tanh"), grad_up


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        low = gate.clamp(max=CLAMPED_LIMIT)
        product = (CLAMPED_SLOPE * low).sigmoid_().mul_(low)
        del low  # frees memory for the next result
        return product.mul_(up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT).add_(1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (gate, up), grad = ctx.saved_tensors, grads[0]
        is_outside = up.abs() > CLAMPED_LIMIT
        low = gate.clamp(max=CLAMPED_LIMIT)
        share = (CLAMPED_SLOPE * low).sigmoid_()
        grad_up = (grad * low).mul_(share).masked_fill_(is_outside, 0)
        del is_outside
        # d/dx of x sigmoid(a x) is s + a x s (1 - s).
        slope = low.mul_(CLAMPED_SLOPE).mul_(share).mul_(1 - share).add_(share)
        del share
        grad_gate = slope.mul_(grad).mul_(up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT).add_(1))
        return grad_gate.masked_fill_(gate > CLAMPED_LIMIT, 0), grad_up
