"""Optimizer state in 8 bits: each value is a table code times its block's scale (Dettmers et al. 2022).

    block     256 neighbours in a row of the *whole* tensor; its scale is their largest magnitude
    code      1 byte: the nearest entry of a table of numbers up to 1, or one of the two nearest, chosen stochastically

The tables are dynamic: each decade has twice as many entries as the one below, so that large values are kept to half a percent
and small ones, down to a millionth, are not lost. Moments span many decades, and a linear table would round most of them to
zero. The second moment is stored as its square root, which halves the decades; a nonzero value never becomes zero, as updates
divide by it. Rows are cut into blocks by their columns in the whole tensor, so that a rank that holds some columns has the same
blocks as one process; a block that two ranks share takes the larger of their scales (`widest`).

The random numbers of stochastic rounding, to codes or to a narrow dtype, are a function of (key, position): the same bits
whichever rank rounds which part.

    x between two neighbours lo and hi of the narrow dtype     hi with probability (x - lo) / (hi - lo), else lo

so that the expected stored value is x, and a change far below the spacing still has an effect on average (Gupta et al. 2015). A
random generator's numbers would depend on how many were drawn before, that is on the layout. Here each element hashes its
position in the whole tensor, and a checkpoint needs no generator state. Cost: some ten passes over integers; callers work in
chunks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.catalogue.stacks.stack import SCALED_TOGETHER

BLOCK = SCALED_TOGETHER
DECADES = 7
SMALLEST = 2.0**-60
"""Magnitudes below this become zero: their squares, which checkpoints hold, would underflow fp32."""
ReduceScales = Callable[[Tensor], Tensor]


def identity(scales: Tensor) -> Tensor:
    """Identity, for where no rank shares a block."""
    return scales


@cache
def table(*, signed: bool) -> Tensor:
    """Values of the codes, ascending, [255] or [256] fp32, on the CPU: 0, 1, and in the i-th of 7 decades up to 1 the midpoints
    of 2^i (signed; the lowest decade is left out, for -1) or 2^(i+1) equal parts."""
    values = [0.0, 1.0] + ([-1.0] if signed else [])
    for decade in range(1 if signed else 0, DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        middles = [(0.1 + 0.9 * (part + 0.5) / count) * 10.0 ** (decade - DECADES + 1) for part in range(count)]
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values))


def num_blocks(columns: int, first: int = 0) -> int:
    """Number of blocks that `columns` columns of a row touch, from column `first` on."""
    return -(-(first % BLOCK + columns) // BLOCK)


def quantise(
    values: Tensor, *, signed: bool, first: int = 0, random: Tensor | None = None, widest: ReduceScales = identity
) -> tuple[Tensor, Tensor]:
    """Codes [R, C] uint8 and scales [R, blocks] fp32 of `values` [R, C] fp32, columns `first` and on of the whole rows.

    `random`: 24-bit integers [R, C] for stochastic rounding; None: round to nearest. `widest`: maximum of scales over all ranks
    that share blocks. Unsigned values must be at least 0.
    """
    values = values.masked_fill(values.abs() < SMALLEST, 0.0)
    scales = widest(_by_block(values, first).abs().amax(-1))
    numbers = table(signed=signed).to(values.device)
    parts = values / _spread(scales, first, values.shape[1]).clamp_min(SMALLEST)
    low = (torch.searchsorted(numbers, parts, right=True) - 1).clamp_(0, len(numbers) - 2)
    share = (parts - numbers[low]) / (numbers[low + 1] - numbers[low])
    codes = low + (share > 0.5 if random is None else random < share * 2**NOISE_BITS)
    if not signed:
        codes = torch.where(parts > 0, codes.clamp_min(1), codes)
    return codes.to(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor, *, signed: bool, first: int = 0) -> Tensor:
    """Values [R, C] fp32 of codes [R, C] and scales [R, blocks]."""
    return table(signed=signed).to(codes.device)[codes.int()] * _spread(scales, first, codes.shape[1])


def _by_block(values: Tensor, first: int) -> Tensor:
    """Values by block, [R, blocks, 256], zero-padded where a row begins or ends inside a block."""
    before = first % BLOCK
    after = -(before + values.shape[1]) % BLOCK
    return F.pad(values, (before, after)).unflatten(1, (-1, BLOCK))


def _spread(scales: Tensor, first: int, columns: int) -> Tensor:
    """Each value's scale, [R, C]."""
    before = first % BLOCK
    return scales.repeat_interleave(BLOCK, dim=1)[:, before : before + columns]


_MASK = 0xFFFFFFFF
NOISE_BITS = 24
"""Bits of noise: as many as the fraction of fp32 holds."""
BF16_DROPPED_BITS = 16
"""Bits of fp32 that bf16 lacks."""


def rounding_key(seed: int, update: int, name: str, moment: str) -> int:
    """Rounding key for one moment of one weight in one update, shared by all its elements: 32 bits."""
    return zlib.crc32(f"{seed} {update} {name} {moment}".encode())


def positions(shape: tuple[int, ...], offsets: tuple[int, ...], whole: tuple[int, ...], device: torch.device) -> Tensor:
    """Position in the whole tensor (shape `whole`, row-major) of the first element of each row of the box of `shape` at
    `offsets`, [rows] int64. All dimensions but the last form rows."""
    first = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, extent in zip(shape[:-1], offsets[:-1], whole[:-1], strict=True):
        first = (first * extent).unsqueeze(-1) + torch.arange(offset, offset + size, device=device)
    return first.flatten() * whole[-1] + offsets[-1]


def noise(rows: Tensor, columns: int, key: int) -> Tensor:
    """Uniform 24-bit integers, [rows, columns] int64: a hash of `key` and each element's position. `rows`: from `positions`."""
    x = rows.unsqueeze(-1) + torch.arange(columns, device=rows.device)
    x = (x & _MASK) ^ ((x >> 32) * 0x9E3779B1 & _MASK) ^ key
    # Two rounds of a 32-bit mixer (Wellons 2018, "lowbias32").
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
        x = x ^ (x >> 16)
    return x >> (32 - NOISE_BITS)


def round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Finite fp32 `values` rounded stochastically to bf16 by `random`, 24-bit integers of the same shape."""
    bits = values.contiguous().view(torch.int32)
    bits = bits + (random >> (NOISE_BITS - BF16_DROPPED_BITS)).to(torch.int32)
    return (bits & -(1 << BF16_DROPPED_BITS)).view(torch.float32).to(torch.bfloat16)
