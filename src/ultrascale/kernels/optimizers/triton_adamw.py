"""AdamW with narrow moments in Triton: read, widen, update and round in one pass over memory, where torch takes dozens.

    bf16      a program handles 1,024 elements of a row; each moment's low half of fp32 is rounded away by random bits
    8 bits    a program handles 4 blocks of 256, each with a scale: the largest magnitude of the new moments.
              A code is found by bisection of the table, which stays in the L1 cache: 8 reads there

Memory traffic per element: gradient 4 bytes, master 8, moments 8 or 4 (and 1/16 of scales). Random bits are the hash of
`kernels.optimizers.block_quantise`, in unsigned 32-bit words: the same bits for the same key and position, so that a test can
compare codes. A scale shared with other ranks is not supported here (`narrow_moments`).
"""

# What `triton.jit` makes of a function has no types, and triton need not be installed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ultrascale.kernels.optimizers.block_quantise import BLOCK, NOISE_BITS, SMALLEST, num_blocks, table
from ultrascale.kernels.optimizers.narrow_moments import FIRST, SECOND, Update

_COLUMNS = 1024
"""Columns per program in bf16."""
_BLOCKS = 4
"""Blocks per program in 8 bits."""
_CHANGE = ("key_of_first", "key_of_second", "take_first", "keep_second", "take_second", "unbias", "eps", "shrink", "step")
"""Numbers that change from update to update: Triton must not specialise on their values."""


def update_(weights: Tensor, gradients: Tensor, state: dict[str, Tensor], places: Tensor, update: Update) -> None:
    """Update [rows, columns] fp32, contiguous, and their moments in `state`, in place.

    places [rows] int64: position of each row's first element in the whole weight; rows begin at a block boundary.
    """
    rows, columns = weights.shape
    numbers = (
        *(_signed(key) for key in update.keys), 1 - update.beta1, update.beta2, 1 - update.beta2,
        1 - update.beta2**update.count, update.eps, 1 - update.rate * update.decay,
        -update.rate / (1 - update.beta1**update.count),
    )  # fmt: skip
    first, second = state[FIRST], state[SECOND]
    if first.dtype == torch.bfloat16:
        grid = (rows, triton.cdiv(columns, _COLUMNS))
        _bf16[grid](weights, gradients, first, second, places, columns, *numbers, COLUMNS=_COLUMNS)
        return
    signed, unsigned = (_table(weights.device, signed=signed) for signed in (True, False))
    blocks = num_blocks(columns)
    _eight[rows, triton.cdiv(blocks, _BLOCKS)](
        weights, gradients, first, second, state[f"{FIRST}_scale"], state[f"{SECOND}_scale"], signed, unsigned, places, columns,
        blocks, *numbers, len(signed), len(unsigned), LEAST=SMALLEST, STEPS=1 << NOISE_BITS, BLOCKS=_BLOCKS, BLOCK=BLOCK,
    )  # fmt: skip


@cache
def _table(device: torch.device, *, signed: bool) -> Tensor:
    return table(signed=signed).to(device)


def _signed(key: int) -> int:
    """A 32-bit key as a signed number, which always has the same type in Triton."""
    return key - (1 << 32) if key >> 31 else key


@triton.jit
def _noise(places, key):
    """`block_quantise.noise`: 24 bits, uint32."""
    x = places.to(tl.uint32) ^ ((places >> 32).to(tl.uint32) * tl.cast(0x9E3779B1, tl.uint32)) ^ key.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(2):  # pyright: ignore
        x = (x ^ (x >> 16)) * tl.cast(0x7FEB352D, tl.uint32)
        x = (x ^ (x >> 15)) * tl.cast(0x846CA68B, tl.uint32)
        x = x ^ (x >> 16)
    return x >> 8


@triton.jit
def _adamw(weight, gradient, first, second, take_first, keep_second, take_second, unbias, eps, shrink, step):
    """New weight and moments."""
    first = first + take_first * (gradient - first)
    second = second * keep_second + take_second * gradient * gradient
    return weight * shrink + step * first / (tl.sqrt(second / unbias) + eps), first, second


@triton.jit
def _round_to_bf16(values, noise):
    """`block_quantise.round_to_bf16` with these random bits."""
    bits = values.to(tl.uint32, bitcast=True) + (noise >> 8)
    return (bits & tl.cast(0xFFFF0000, tl.uint32)).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=_CHANGE)
def _bf16(
    weights, gradients, firsts, seconds, places, columns, key_of_first, key_of_second, take_first, keep_second, take_second,
    unbias, eps, shrink, step, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    addr = row * columns + column
    weight, first, second = _adamw(
        tl.load(weights + addr, mask=inside, other=0.0), tl.load(gradients + addr, mask=inside, other=0.0),
        tl.load(firsts + addr, mask=inside, other=0.0).to(tl.float32),
        tl.load(seconds + addr, mask=inside, other=0.0).to(tl.float32),
        take_first, keep_second, take_second, unbias, eps, shrink, step,
    )  # fmt: skip
    tl.store(weights + addr, weight, mask=inside)
    place = tl.load(places + row) + column
    tl.store(firsts + addr, _round_to_bf16(first, _noise(place, key_of_first)), mask=inside)
    tl.store(seconds + addr, _round_to_bf16(second, _noise(place, key_of_second)), mask=inside)


@triton.jit
def _quantised(values, noise, numbers, length, LEAST: tl.constexpr, STEPS: tl.constexpr):
    """`block_quantise.quantise` of [blocks, 256]: codes, and the scale of each block."""
    values = tl.where(tl.abs(values) < LEAST, 0.0, values)
    scale = tl.max(tl.abs(values), axis=1)
    parts = values / tl.maximum(scale, LEAST)[:, None]
    low = tl.zeros_like(parts).to(tl.int32)
    for power in tl.static_range(8):  # pyright: ignore
        above = low + (128 >> power)
        fits = above < length - 1
        low = tl.where(fits & (tl.load(numbers + above, mask=fits, other=2.0) <= parts), above, low)
    under, over = tl.load(numbers + low), tl.load(numbers + low + 1)
    share = (parts - under) / (over - under)
    return low + (noise.to(tl.float32) < share * STEPS).to(tl.int32), parts, scale


@triton.jit(do_not_specialize=_CHANGE)
def _eight(
    weights, gradients, firsts, seconds, scales_of_first, scales_of_second, signed, unsigned, places, columns, blocks,
    key_of_first, key_of_second, take_first, keep_second, take_second, unbias, eps, shrink, step, num_signed, num_unsigned,
    LEAST: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, addr, is_block, at_scale = column < columns, row * columns + column, block < blocks, row * blocks + block
    scale = tl.load(scales_of_first + at_scale, mask=is_block, other=0.0)[:, None]
    first = tl.load(signed + tl.load(firsts + addr, mask=inside, other=0).to(tl.int32)) * scale
    scale = tl.load(scales_of_second + at_scale, mask=is_block, other=0.0)[:, None]
    root = tl.load(unsigned + tl.load(seconds + addr, mask=inside, other=0).to(tl.int32)) * scale
    weight, first, second = _adamw(
        tl.load(weights + addr, mask=inside, other=0.0), tl.load(gradients + addr, mask=inside, other=0.0), first, root * root,
        take_first, keep_second, take_second, unbias, eps, shrink, step,
    )  # fmt: skip
    tl.store(weights + addr, weight, mask=inside)
    place = tl.load(places + row) + column
    codes, _, scale = _quantised(tl.where(inside, first, 0.0), _noise(place, key_of_first), signed, num_signed, LEAST, STEPS)
    tl.store(firsts + addr, codes.to(tl.uint8), mask=inside)
    tl.store(scales_of_first + at_scale, scale, mask=is_block)
    root = tl.sqrt(tl.where(inside, second, 0.0))
    codes, parts, scale = _quantised(root, _noise(place, key_of_second), unsigned, num_unsigned, LEAST, STEPS)
    codes = tl.where(parts > 0, tl.maximum(codes, 1), codes)  # updates divide by it
    tl.store(seconds + addr, codes.to(tl.uint8), mask=inside)
    tl.store(scales_of_second + at_scale, scale, mask=is_block)
