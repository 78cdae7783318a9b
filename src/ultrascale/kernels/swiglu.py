"""SwiGLU's product, silu(gate) * up (Shazeer 2020), GPT-OSS's clamped form, and GeGLU's, gelu(gate) * up.

Saves for the backward pass: gate and up. Plain autograd also saves silu(gate), half as much again of a block's widest
activation; recomputing it costs one pass over memory. `kernels.triton_swiglu` does the same in one pass per direction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.choice.implementation import form_of

CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0
"""GPT-OSS's `swiglu_alpha` (with it x sigmoid(alpha x) is close to GELU) and `swiglu_limit`."""

Activation = Callable[..., Tensor]
_gelu: Activation = partial(F.gelu, approximate="tanh")
_gelu_backward: Activation = partial(torch.ops.aten.gelu_backward, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise; shapes and dtypes are equal."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    if form_of("swiglu", gate) == "triton":
        return _by_triton(gate, up, clamped=False)
    return _Gated.apply(gate, up, F.silu, torch.ops.aten.silu_backward)  # pyright: ignore[reportReturnType]


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
    return _Gated.apply(gate, up, _gelu, _gelu_backward)  # pyright: ignore[reportReturnType]


def _by_triton(gate: Tensor, up: Tensor, *, clamped: bool) -> Tensor:
    from ultrascale.kernels import triton_swiglu  # here: Triton need not be installed

    return triton_swiglu.swiglu(gate, up, clamped=clamped)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activate: Activation, activate_backward: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activate, ctx.activate_backward = activate, activate_backward
        return activate(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        grad_up = ctx.activate(gate).mul_(grads[0])
        return ctx.activate_backward(grads[0] * up, gate), grad_up, None, None


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
