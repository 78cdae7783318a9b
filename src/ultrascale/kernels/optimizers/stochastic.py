"""Stochastic rounding whose random numbers are a function of (key, position): the same bits whoever rounds which part.

    x between two neighbours lo and hi of the narrow dtype     hi with probability (x - lo) / (hi - lo), else lo

so that the mean of what is stored is x, and a change far below the spacing still moves it now and then (Gupta et al. 2015). A
generator's numbers would depend on how many were drawn before, that is on the layout; here each element hashes its place in the
whole tensor, and nothing needs to be kept in a checkpoint. Cost: some ten passes over integers; callers work in chunks.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
NOISE_BITS = 24
"""Bits of noise: as many as a fraction in fp32 has."""
BF16_DROPPED_BITS = 16
"""Bits of fp32 that bf16 lacks."""


def rounding_key(seed: int, update: int, name: str, moment: str) -> int:
    """One number for all elements of one moment of one weight in one update: 32 bits."""
    return zlib.crc32(f"{seed} {update} {name} {moment}".encode())


def positions(shape: tuple[int, ...], offsets: tuple[int, ...], whole: tuple[int, ...], device: torch.device) -> Tensor:
    """Position of the first element of each row of the box of `shape` at `offsets` in a tensor of shape `whole`, in the order
    of memory of the whole, [rows] int64. All dimensions but the last make rows."""
    first = torch.zeros((), dtype=torch.int64, device=device)
    for size, offset, extent in zip(shape[:-1], offsets[:-1], whole[:-1], strict=True):
        first = (first * extent).unsqueeze(-1) + torch.arange(offset, offset + size, device=device)
    return first.flatten() * whole[-1] + offsets[-1]


def noise(rows: Tensor, columns: int, key: int) -> Tensor:
    """Uniform integers of 24 bits, [rows, columns] int64: a hash of `key` and the place of each element. `rows` as `positions`
    gives them."""
    x = rows.unsqueeze(-1) + torch.arange(columns, device=rows.device)
    x = (x & _MASK) ^ ((x >> 32) * 0x9E3779B1 & _MASK) ^ key
    # Two rounds of a 32-bit mixer (Wellons 2018, "lowbias32").
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
        x = x ^ (x >> 16)
    return x >> (32 - NOISE_BITS)


def round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """fp32 `values`, finite, to bf16 by `random`, 24-bit integers of the same shape."""
    bits = values.contiguous().view(torch.int32)
    bits = bits + (random >> (NOISE_BITS - BF16_DROPPED_BITS)).to(torch.int32)
    return (bits & -(1 << BF16_DROPPED_BITS)).view(torch.float32).to(torch.bfloat16)
