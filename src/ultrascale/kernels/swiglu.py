"""SwiGLU's product, silu(gate) * up (Shazeer 2020).

Saves for the backward pass: gate and up. Plain autograd saves silu(gate) too, half as much again of the widest activation of
a block; computing it again costs one pass over memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, element by element; shapes and dtypes are equal."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGLU.apply(gate, up)  # pyright: ignore[reportReturnType]


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
