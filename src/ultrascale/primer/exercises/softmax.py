"""Softmax over long rows, naive and online: number of times that a row is read.

naive    the maximum, then the sum, then the result: three reads
online   maximum and sum together, the sum rescaled whenever the maximum grows (Milakov and Gimelshein 2018): two
held     a row that fits a program's registers is read once
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ultrascale.primer.exercise import Exercise, Variant, launch, narrow, pick, random


@triton.jit
def _part(x, row, first, width, BLOCK: tl.constexpr):
    columns = first + tl.arange(0, BLOCK)
    return tl.load(x + row * width + columns, mask=columns < width, other=-float("inf")).to(tl.float32)


@triton.jit
def _write(x, out, row, width, highest, total, BLOCK: tl.constexpr):
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.exp(_part(x, row, first, width, BLOCK) - highest) / total
        tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _naive(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest = -float("inf")
    for first in range(0, width, BLOCK):
        highest = tl.maximum(highest, tl.max(_part(x, row, first, width, BLOCK)))
    total = 0.0
    for first in range(0, width, BLOCK):
        total += tl.sum(tl.exp(_part(x, row, first, width, BLOCK) - highest))  # pyright: ignore[reportOperatorIssue]
    _write(x, out, row, width, highest, total, BLOCK)


@triton.jit
def _online(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    highest, total = -float("inf"), 0.0
    for first in range(0, width, BLOCK):
        values = _part(x, row, first, width, BLOCK)
        higher = tl.maximum(highest, tl.max(values))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher))
        highest = higher
    _write(x, out, row, width, highest, total, BLOCK)


@triton.jit
def _held(x, out, width, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = _part(x, row, 0, width, BLOCK)
    values = tl.exp(values - tl.max(values))
    tl.store(out + row * width + columns, (values / tl.sum(values)).to(out.dtype.element_ty), mask=columns < width)


def softmax(x: torch.Tensor, variant: str, *, block: int) -> torch.Tensor:
    """Softmax of each row of [R, W]; `variant`: naive, online or held, which needs `block` of at least W."""
    out = torch.empty_like(x)
    kernel = {"naive": _naive, "online": _online, "held": _held}[variant]
    launch(kernel, (x.shape[0],), x, out, x.shape[1], BLOCK=block, num_warps=8)
    return out


def exercise(device: torch.device) -> Exercise:
    """Rows as wide as a vocabulary, and rows that fit into registers."""
    wide = random(pick(device, 1024, 6), pick(device, 131072, 700), device=device, dtype=narrow(device))
    short = random(pick(device, 32768, 6), pick(device, 4096, 100), device=device, dtype=narrow(device))
    ways = (("naive", wide, pick(device, 8192, 128)), ("online", wide, pick(device, 8192, 128)),
            ("held", short, pick(device, 4096, 128)))  # fmt: skip
    return Exercise(
        "softmax",
        "Naive and online softmax",
        "One read and one write are needed; naive reads three times: at most half the memory bandwidth, online two thirds.\n"
        "The running maximum lets attention iterate over its keys once: flash attention uses it twice.",
        tuple(
            Variant(
                f"{variant}, rows of {x.shape[1]}",
                lambda x=x, variant=variant, block=block: softmax(x, variant, block=block),
                lambda x=x: torch.softmax(x.double(), dim=1),
                num_bytes=2 * x.numel() * x.element_size(),
            )
            for variant, x, block in ways
        ),
    )
