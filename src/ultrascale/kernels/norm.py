"""RMSNorm: y = x / rms(x) * weight (Zhang and Sennrich 2019), computed in fp32 or wider.

Saves for the backward pass: x, the weight, and one number per row in fp32 (or fp64), as CUDA's fused kernel does. On CPU
`F.rms_norm` is not fused: separate operations each save their input, and take about twice the time and three times the memory.
CUDA and the compiler have better kernels, so there `F.rms_norm` is used, or `kernels.triton_norm` or Liger's kernel if the run
selects it or it was faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.kernels.choice.implementation import form_of
from ultrascale.kernels.choice.wide import at_least_fp32

LARGEST_ROW = 2**14
"""Most elements of a row for the Triton kernel, which holds it in registers: longer rows would spill to memory
(`triton_launch`)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [..., D], times weight [D], which may be wider than x; the result has x's dtype."""
    form = "torch" if torch.compiler.is_compiling() else form_of("norm", x)
    if form == "triton" and x.shape[-1] <= LARGEST_ROW:
        from ultrascale.kernels import triton_norm  # here: Triton need not be installed

        return triton_norm.rms_norm(x, weight, eps)
    if form == "liger":
        return _by_liger(x, weight, eps)
    if torch.compiler.is_compiling():
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
    if is_cuda(x) and x.dtype == weight.dtype:  # for mixed dtypes torch's is not fused either
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _RMSNorm.apply(x, weight, eps)  # pyright: ignore[reportReturnType]


def fuses_sums(x: Tensor) -> bool:
    """True if one kernel of this run computes the sum and its norm (`add_rms_norm`)."""
    return not torch.compiler.is_compiling() and form_of("norm_of_sum", x) != "torch" and x.shape[-1] <= LARGEST_ROW


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + added), x + added), both [..., D] in the dtype of x: the residual add and the norm between two layers.

    One kernel reads x and added once and writes both results, 4 memory accesses per element; separate kernels take 5.
    """
    if not fuses_sums(x):
        total = x + added
        return rms_norm(total, weight, eps), total
    if form_of("norm_of_sum", x) == "triton":
        from ultrascale.kernels import triton_norm  # here: Triton need not be installed

        return triton_norm.add_rms_norm(x, added, weight, eps)
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm  # pyright: ignore[reportMissingImports]

    return liger_fused_add_rms_norm(x, added, weight, eps, in_place=False)


def _by_liger(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm  # pyright: ignore[reportMissingImports]

    return liger_rms_norm(x, weight, eps, in_place=False)  # in place it would overwrite the incoming gradient


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1]
        inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = at_least_fp32(grads[0])
        normed = at_least_fp32(x) * inverse_rms
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad * weight
        along = torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1).div_(-x.shape[-1])
        grad_x = grad_normed.addcmul_(normed, along).mul_(inverse_rms)
        return grad_x.to(x.dtype), grad_weight, None
