"""Matrices in 8-bit floats, and their products (Micikevicius et al. 2022), with current scaling.

A scale is the largest magnitude over the largest number of the format: of the whole tensor, or of each row (a token's, or an
output feature's of a weight). Where ranks hold parts of what has one scale, it is the largest magnitude of all of them: then a
rank rounds its part to the very bits that one process would.

CUDA devices that have them (8.9 and later) use torch's scaled products. Of left [M, K] and right [N, K] these want multiples of
16 of K and of N, and take any M. Factors are filled up with zeros where sizes are none, which adds nothing to any sum: in the
gradient of a weight K is a number of tokens. Elsewhere the rounded factors are multiplied in fp32: the same numbers but for the
order and, on Hopper, the bits of sums. (In fp64 between products, which proofs use, in fp64: then the order of sums is all that
tells ranks from one process.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.torch_private import scaled_mm

Scaling = Literal["row", "tensor"]
FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Divisor of the columns of both factors and the rows of the right one, for scaled GEMMs on CUDA."""
NATIVE = (8, 9)
"""Compute capability from which there are products of fp8."""
NATIVE_RESULT = torch.bfloat16
"""Dtype that runs in fp8 compute in between GEMMs, and that torch's scaled GEMM returns with every kind of scales. Proofs ask
for wider ones."""
SMALLEST = 1e-12
"""Lower bound of a largest magnitude: zeros stay zeros."""
ReduceAmax = Callable[[Tensor], Tensor]
"""Maximum over ranks: from largest magnitudes on this rank, [n], those over all ranks that hold parts of the same rows."""


class Narrow(NamedTuple):
    """A matrix in fp8."""

    values: Tensor
    scale: Tensor
    """Scale by which values are multiplied, at least fp32, [rows, 1] or [1, 1]."""


def narrow(wide: Tensor, scaling: Scaling, dtype: torch.dtype = FORWARD) -> Narrow:
    """[rows, columns] rounded to `dtype`."""
    return narrow_all([wide], scaling, dtype)[0]


def narrow_all(
    wides: Iterable[Tensor], scaling: Scaling, dtype: torch.dtype = FORWARD, reduce_amax: ReduceAmax | None = None
) -> list[Narrow]:
    """Several matrices [rows, columns] rounded to `dtype`, one after the other. `reduce_amax`: asked once, for the amaxes
    of all of them, which then exist together."""
    if reduce_amax is None:
        return [_narrow(wide, largest_of(wide, scaling), dtype) for wide in wides]
    wides = list(wides)
    largest = [largest_of(wide, scaling) for wide in wides]
    parts = reduce_amax(torch.cat([amax.flatten() for amax in largest])).split([amax.numel() for amax in largest])
    return [_narrow(wide, part.view_as(amax), dtype) for wide, part, amax in zip(wides, parts, largest, strict=True)]


def largest_of(wide: Tensor, scaling: Scaling) -> Tensor:
    """Magnitude in each row, [rows, 1], or in all, [1, 1]; at least fp32. No copy of the matrix is made."""
    least, most = wide.aminmax(dim=1, keepdim=True) if scaling == "row" else (extreme.view(1, 1) for extreme in wide.aminmax())
    return _at_least_fp32(torch.maximum(-least, most))


def _narrow(wide: Tensor, largest: Tensor, dtype: torch.dtype) -> Narrow:
    return rounded(wide, largest.clamp_min(SMALLEST) / torch.finfo(dtype).max, dtype)


def rounded(wide: Tensor, scale: Tensor, dtype: torch.dtype = FORWARD) -> Narrow:
    """[rows, columns] with a scale that is known; what is beyond the format's largest number becomes that."""
    limit = torch.finfo(dtype).max
    return Narrow((wide / scale).clamp_(-limit, limit).to(dtype), scale)  # the quotient has the dtype of the scale


def product(left: Narrow, right: Narrow, dtype: torch.dtype) -> Tensor:
    """left right^T, [M, N] in `dtype`, of [M, K] and [N, K]. Both are scaled by row, or both by tensor."""
    values = left.values, right.values
    if torch.compiler.is_compiling() and is_cuda(left.values):  # a turned factor is written so by what rounds it, not copied
        values = left.values.contiguous(), right.values.contiguous()
    return scaled_product(values[0], left.scale, values[1], right.scale, dtype)


@custom_op("ultrascale::scaled_product", mutates_args=())
def scaled_product(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`product` as one torch operation, whose result selective recomputation keeps."""
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

    Hopper sums fp8 products in 14 bits (DeepSeek-V3, section 3.3.2), and every 128 in fp32 if asked, which takes longer. Asked
    are gradients with one scale for a tensor, as Transformer Engine and torchao do; of those with scales of rows torchao
    (`float8/config.py`) says that they are fast no other way.
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
    addresses of whole multiples of 16, which an expert's among others' is not."""
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
    """Row by row in memory, with zeros up to a size."""
    missing = columns - matrix.shape[1], rows - len(matrix)
    return F.pad(matrix, (0, missing[0], 0, missing[1])).contiguous() if any(missing) else matrix.contiguous()


def transposed(matrix: Narrow, scaling: Scaling) -> Narrow:
    """The transpose, for a product over what were rows. Scales of rows are in its other factor already."""
    return Narrow(matrix.values.t(), transposed_scale(matrix, scaling))


def transposed_scale(matrix: Narrow, scaling: Scaling) -> Tensor:
    """Scale of `transposed`."""
    return torch.ones_like(matrix.scale[:1]).expand(matrix.values.shape[-1], 1) if scaling == "row" else matrix.scale


def _at_least_fp32(wide: Tensor) -> Tensor:
    return wide if wide.dtype == torch.float64 else wide.float()


def _runs_native(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Nothing to multiply is no work for it; else all that a run in fp8 multiplies is, on a device that has such products."""
    is_work = left.numel() > 0 and right.numel() > 0
    return is_work and dtype is NATIVE_RESULT and is_cuda(left) and multiplies_fp8(left.device)


def multiplies_fp8(device: torch.device) -> bool:
    """True if the device has fp8 GEMMs; a device that is only traced is assumed to have them."""
    return device.type == "meta" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE)
