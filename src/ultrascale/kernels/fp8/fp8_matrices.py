"""Matrices in fp8, and their GEMMs (Micikevicius et al. 2022), with current scaling.

A scale is the amax (largest magnitude) over the format's largest number: of the whole tensor, or of each row (of a token, or of
a weight's output feature). Where ranks hold parts of a tensor with one scale, the amax is taken over all of them: each rank
then rounds its part to the very bits that one process would.

CUDA devices from 8.9 on use torch's scaled GEMMs. For left [M, K] and right [N, K] they require K and N to be multiples of 16,
with any M. Factors are zero-padded otherwise, which changes no sum: in a weight's gradient K is a number of tokens. Other
devices multiply the quantised factors in fp32: the same numbers except for the order and, against Hopper, the precision of
sums. (With fp64 between GEMMs, as in proofs, in fp64: ranks then differ from one process only in the order of sums.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.kernels.choice.wide import at_least_fp32
from ultrascale.torch_private import scaled_mm

Scaling = Literal["row", "tensor"]
FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Divisor of the columns of both factors and the rows of the right one, for scaled GEMMs on CUDA."""
NATIVE = (8, 9)
"""Lowest compute capability with fp8 GEMMs."""
NATIVE_RESULT = torch.bfloat16
"""Dtype between GEMMs in fp8 runs, which torch's scaled GEMM returns for every kind of scales. Proofs use wider ones."""
SMALLEST = 1e-12
"""Lower bound of an amax, so that zeros stay zeros."""
ReduceAmax = Callable[[Tensor], Tensor]
"""Maximum over ranks: from amaxes on this rank, [n], to those over all ranks that hold parts of the same rows."""


class Narrow(NamedTuple):
    """A matrix in fp8."""

    values: Tensor
    scale: Tensor
    """Scale that multiplies the values, fp32 or wider, [rows, 1] or [1, 1]."""


def narrow(wide: Tensor, scaling: Scaling, dtype: torch.dtype = FORWARD) -> Narrow:
    """Matrix [rows, columns] quantised to `dtype`."""
    return narrow_all([wide], scaling, dtype)[0]


def narrow_all(
    wides: Iterable[Tensor], scaling: Scaling, dtype: torch.dtype = FORWARD, reduce_amax: ReduceAmax | None = None
) -> list[Narrow]:
    """Several matrices [rows, columns] quantised to `dtype`, one after the other. `reduce_amax`: called once, for the amaxes of
    all of them, which then are in memory together."""
    if reduce_amax is None:
        return [rounded(wide, scales_of([largest_of(wide, scaling)], dtype)[0], dtype) for wide in wides]
    wides = list(wides)
    scales = scales_of([largest_of(wide, scaling) for wide in wides], dtype, reduce_amax)
    return [rounded(wide, scale, dtype) for wide, scale in zip(wides, scales, strict=True)]


def largest_of(wide: Tensor, scaling: Scaling) -> Tensor:
    """Amax of each row, [rows, 1], or of the matrix, [1, 1]; fp32 or wider. Makes no copy of the matrix."""
    least, most = wide.aminmax(dim=1, keepdim=True) if scaling == "row" else (extreme.view(1, 1) for extreme in wide.aminmax())
    return at_least_fp32(torch.maximum(-least, most))


def scales_of(largest: Sequence[Tensor], dtype: torch.dtype, reduce_amax: ReduceAmax | None = None) -> list[Tensor]:
    """Scales by which tensors with these amaxes fill `dtype`. `reduce_amax`: called once, for all of them."""
    if reduce_amax is not None:
        parts = reduce_amax(torch.cat([amax.flatten() for amax in largest])).split([amax.numel() for amax in largest])
        largest = [part.view_as(amax) for part, amax in zip(parts, largest, strict=True)]
    return [amax.clamp_min(SMALLEST) / torch.finfo(dtype).max for amax in largest]


def rounded(wide: Tensor, scale: Tensor, dtype: torch.dtype = FORWARD) -> Narrow:
    """Matrix [rows, columns] quantised with a known scale; values beyond the format's largest number saturate."""
    limit = torch.finfo(dtype).max
    return Narrow((wide / scale).clamp_(-limit, limit).to(dtype), scale)  # the quotient has the dtype of the scale


def product(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """left right^T, [M, N] in `dtype`, from [M, K] and [N, K]. Both have row scales, or both one scale per tensor."""
    values = left.values, right.values
    if torch.compiler.is_compiling() and is_cuda(left.values):  # the quantising kernel writes a transposed factor directly
        values = left.values.contiguous(), right.values.contiguous()
    return scaled_product(values[0], left.scale, values[1], right.scale, dtype)


@custom_op("ultrascale::scaled_product", mutates_args=())
def scaled_product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`product` as one torch operation, whose result selective recomputation saves."""
    return multiplied(left, left_scale, right, right_scale, dtype)


@scaled_product.register_fake
def _(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(len(left), len(right), dtype=dtype)


PRODUCT = torch.ops.ultrascale.scaled_product.default


def multiplied(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`product` for use inside operations that also communicate."""
    if _runs_native(left, right, dtype):
        return _native(left, left_scale, right, right_scale, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (left.to(wide) @ right.to(wide).t()).mul_(left_scale).mul_(right_scale.t()).to(dtype)


def _native(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Product by torch's scaled GEMM, with factors padded to the sizes that it takes.

    Hopper accumulates fp8 products in 14 bits (DeepSeek-V3, section 3.3.2), or on request every 128 in fp32, which takes
    longer. It is requested for gradients with one scale per tensor, as Transformer Engine and torchao do; with row scales fast
    accumulation is the only fast way, according to torchao (`float8/config.py`).
    """
    is_fast = left_scale.numel() > 1 or GRADIENT not in (left.dtype, right.dtype)
    rows, columns = multiple(len(right)), multiple(left.shape[1])
    padded = scaled_mm(
        _padded(left, len(left), columns), _padded(right, rows, columns).t(), *_native_scales(left_scale, right_scale, rows),
        out_dtype=dtype, use_fast_accum=is_fast,
    )  # fmt: skip
    return padded.narrow(1, 0, len(right)).contiguous()


def _native_scales(left: Tensor, right: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Scales as torch's scaled GEMM takes them, for `rows` rows of the right factor: a scalar each, or [M, 1] and [1, rows]; at
    addresses that are multiples of 16, which a view of one expert's scale is not."""
    if left.numel() == right.numel() == 1:
        return _aligned(left.reshape(())), _aligned(right.reshape(()))
    whole = F.pad(right, (0, 0, 0, rows - len(right))) if rows > len(right) else right
    return _aligned(left.contiguous()), _aligned(whole.t().contiguous())


def _aligned(scale: Tensor) -> Tensor:
    return scale.clone() if scale.storage_offset() * scale.element_size() % MULTIPLE else scale


def multiple(size: int) -> int:
    """The next multiple of 16."""
    return -(-size // MULTIPLE) * MULTIPLE


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Row-major copy, zero-padded to a size."""
    missing = columns - matrix.shape[1], rows - len(matrix)
    return F.pad(matrix, (0, missing[0], 0, missing[1])).contiguous() if any(missing) else matrix.contiguous()


def transposed(matrix: Narrow, scaling: Scaling) -> Narrow:
    """Transpose, for a GEMM that sums over what were rows. Row scales have been multiplied into the other factor already."""
    return Narrow(matrix.values.t(), transposed_scale(matrix, scaling))


def transposed_scale(matrix: Narrow, scaling: Scaling) -> Tensor:
    """Scale of `transposed`."""
    return torch.ones_like(matrix.scale[:1]).expand(matrix.values.shape[-1], 1) if scaling == "row" else matrix.scale


def _runs_native(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """True if torch's scaled GEMM can run: the factors are not empty, and the device supports fp8."""
    is_work = left.numel() > 0 and right.numel() > 0
    return is_work and dtype is NATIVE_RESULT and is_cuda(left) and multiplies_fp8(left.device)


def multiplies_fp8(device: torch.device) -> bool:
    """True if the device has fp8 GEMMs; a device that is only traced is assumed to have them."""
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE)
