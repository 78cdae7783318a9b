"""Coalesced and strided access. A warp's 32 loads of neighbours are one transaction of 128 bytes; 32 loads far apart are 32."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ultrascale.primer.exercise import Exercise, Variant, launch, pick, random

BLOCK = 1024
STRIDES = (1, 2, 4, 8, 32)


@triton.jit
def _take_every(source, target, count, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(target + index, tl.load(source + index * stride, mask=inside), mask=inside)


def take_every(source: torch.Tensor, stride: int) -> torch.Tensor:
    """Every `stride`-th element of a vector."""
    count = source.numel() // stride
    target = torch.empty(count, device=source.device, dtype=source.dtype)
    launch(_take_every, (triton.cdiv(count, BLOCK),), source, target, count, stride, BLOCK=BLOCK)
    return target


def exercise(device: torch.device) -> Exercise:
    """Copies of the same number of elements, with larger and larger strides."""
    count = pick(device, 2**25, 3000)

    def variant(stride: int) -> Variant:
        source = random(count * stride, device=device)
        return Variant(
            f"every {stride}. element" if stride > 1 else "neighbours",
            lambda: take_every(source, stride),
            lambda: source[::stride],
            num_bytes=2 * count * source.element_size(),
        )

    return Exercise(
        "access",
        "Coalesced and strided access",
        "Stride 2 reads twice what it uses; from 8 floats on, a number costs a sector of 32 bytes: 2 of 9 bytes are used.\n"
        "Beyond that only pages and banks make it slower. Memory layouts keep together what is used together.",
        tuple(variant(stride) for stride in STRIDES),
    )
