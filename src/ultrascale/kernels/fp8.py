"""Linear layers whose three products are in 8-bit floats (Micikevicius et al. 2022), with current scaling.

    y  = x W^T           x, W in e4m3
    dx = g W             g in e5m2 (one scale for a tensor) or e4m3 (one for a row), W as in the forward pass
    dW = g^T x           g again, x as in the forward pass: it is what waits for the backward pass, 1 byte an element

A scale is the largest magnitude over the largest number of the format: of the whole tensor, or of each row (a token's, or an
output feature's of W). Along the dimension that a product sums over, scales cannot be taken out of the sum; by rows they are
taken *into* the other factor before that is rounded: dx = (g s_W) W_q and dW = (g s_x)^T x_q. So x and W are rounded once,
and x once for all projections that read it.

CUDA devices that have them (8.9 and later) use torch's scaled products, where sizes are multiples of 16; elsewhere the rounded
factors are multiplied in fp32, which is what those do inside: the same numbers but for the order of sums.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.device_kind import is_cuda

Scaling = Literal["row", "tensor"]
FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Of the sizes of scaled products on CUDA."""
NATIVE = (8, 9)
"""Compute capability from which there are products of fp8."""
SMALLEST = 1e-12
"""Of a largest magnitude: zeros stay zeros."""


class Narrow(NamedTuple):
    """A matrix in fp8."""

    values: Tensor
    scale: Tensor
    """fp32, [rows, 1] or [1, 1]: what values are multiplied by."""


def narrow(wide: Tensor, scaling: Scaling, dtype: torch.dtype = FORWARD) -> Narrow:
    """[rows, columns] rounded to `dtype`."""
    wide = wide.float()
    largest = wide.abs().amax(1, keepdim=True) if scaling == "row" else wide.abs().amax().view(1, 1)
    limit = torch.finfo(dtype).max
    scale = largest.clamp_min(SMALLEST) / limit
    return Narrow((wide / scale).clamp_(-limit, limit).to(dtype), scale)


def product(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """left right^T, [M, N] in `dtype`, of [M, K] and [N, K]. Both are scaled by row, or both by tensor."""
    return scaled_product(left.values, left.scale, right.values, right.scale, dtype)


@custom_op("ultrascale::scaled_product", mutates_args=())
def scaled_product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same as one operation of torch's, whose result selective recomputation keeps."""
    if _runs_native(left, right):
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            left.contiguous(), right.contiguous().t(), scale_a=_one_or_all(left_scale),
            scale_b=_one_or_all(right_scale.t()), out_dtype=dtype,
        )  # fmt: skip
    return (left.float() @ right.float().t()).mul_(left_scale).mul_(right_scale.t()).to(dtype)


@scaled_product.register_fake
def _(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(len(left), len(right), dtype=dtype)


PRODUCT = torch.ops.ultrascale.scaled_product.default


def fp8_linear(hidden: Tensor, weights: list[Tensor], biases: list[Tensor], scaling: Scaling) -> tuple[Tensor, ...]:
    """[..., D] and weights [F, D] to [..., F] each; biases [F] of all or of none."""
    return _Linear.apply(hidden, scaling, len(weights), *weights, *biases)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scaling: Scaling, count: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        given = narrow(hidden.flatten(0, -2), scaling)
        ctx.save_for_backward(*given)
        # Not saved but held: recomputation would give a copy, and FSDP2 gathers them in place.
        ctx.weights, ctx.scaling, ctx.has_bias, ctx.dtype = weights, scaling, bool(biases), hidden.dtype
        found = [product(given, narrow(weight, scaling), hidden.dtype) for weight in weights]
        if biases:
            found = [one + bias for one, bias in zip(found, biases, strict=True)]
        return tuple(one.view(*hidden.shape[:-1], -1) for one in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given, by_row = Narrow(*ctx.saved_tensors), ctx.scaling == "row"
        total, of_weights = None, []
        for weight, grad in zip(ctx.weights, (grad.flatten(0, -2) for grad in grads), strict=True):
            matrix = narrow(weight, ctx.scaling)
            if by_row:
                ones = torch.ones_like(given.scale[:1])
                along = narrow(grad * matrix.scale.t(), "row")  # [N, F]
                across = narrow((grad * given.scale).t(), "row")  # [F, N]
                of_input = product(along, _turned(matrix, ones.expand(matrix.values.shape[1], 1)), ctx.dtype)
                of_weights.append(product(across, _turned(given, ones.expand(given.values.shape[1], 1)), ctx.dtype))
            else:
                rounded = narrow(grad, "tensor", GRADIENT)
                of_input = product(rounded, _turned(matrix, matrix.scale), ctx.dtype)
                of_weights.append(product(_turned(rounded, rounded.scale), _turned(given, given.scale), ctx.dtype))
            total = of_input if total is None else total + of_input
        of_biases = [grad.flatten(0, -2).sum(0) for grad in grads] if ctx.has_bias else []
        assert total is not None
        return total.view(*grads[0].shape[:-1], -1), None, None, *of_weights, *of_biases


def _turned(matrix: Narrow, scale: Tensor) -> Narrow:
    return Narrow(matrix.values.t(), scale)


def _one_or_all(scale: Tensor) -> Tensor:
    return scale.reshape(()) if scale.numel() == 1 else scale.contiguous()


def _runs_native(left: Tensor, right: Tensor) -> bool:
    if not is_cuda(left) or torch.cuda.get_device_capability(left.device) < NATIVE:
        return False
    return all(size % MULTIPLE == 0 and size > 0 for size in (*left.shape, *right.shape))
