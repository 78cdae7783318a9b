"""Attention, naive and flash: softmax(q k^T / sqrt(E)) v with the scores in memory, or without storing them.

Flash (Dao et al. 2022): a program holds a block of queries and iterates over the keys; the running maximum and sum of the
online softmax rescale the accumulated result. Memory for scores: S x S per head, or none.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F

from ultrascale.description.units import format_bytes
from ultrascale.primer.exercise import Exercise, Variant, launch, narrow, pick, random


@triton.jit
def _flash(query, key, value, out, length, scale, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    head = tl.program_id(1).to(tl.int64) * length * WIDTH
    rows = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)[:, None]
    dims = tl.arange(0, WIDTH)[None, :]
    q = tl.load(query + head + rows * WIDTH + dims, mask=rows < length, other=0.0)
    highest = tl.full((QUERIES,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    gathered = tl.zeros((QUERIES, WIDTH), dtype=tl.float32)
    for first in range(0, length, KEYS):
        columns = first + tl.arange(0, KEYS)
        inside = columns[:, None] < length
        k = tl.load(key + head + columns[:, None] * WIDTH + dims, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(columns[None, :] < length, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights, smaller = tl.exp(scores - higher[:, None]), tl.exp(highest - higher)
        v = tl.load(value + head + columns[:, None] * WIDTH + dims, mask=inside, other=0.0)
        gathered = gathered * smaller[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * smaller + tl.sum(weights, axis=1)
        highest = higher
    tl.store(out + head + rows * WIDTH + dims, (gathered / total[:, None]).to(out.dtype.element_ty), mask=rows < length)


def naive(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[H, S, E] each, by three torch operations; scores and weights [H, S, S] are written to memory and read back."""
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ value


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, queries: int, keys: int) -> torch.Tensor:
    """Attention in one kernel, over blocks of this many queries and keys."""
    heads, length, width = query.shape
    out = torch.empty_like(query)
    grid = (triton.cdiv(length, queries), heads)
    launch(
        _flash, grid, query, key, value, out, length, width**-0.5, WIDTH=width, QUERIES=queries, KEYS=keys,
        num_warps=8 if queries >= 128 else 4, num_stages=2,
    )  # fmt: skip
    return out


def exercise(device: torch.device) -> Exercise:
    """Heads of one layer over a long sequence, every token attending to every other."""
    heads, length, width = pick(device, 16, 2), pick(device, 8192, 70), pick(device, 128, 16)
    shape = (heads, length, width)
    query, key, value = (random(*shape, device=device, dtype=narrow(device), seed=seed) for seed in range(3))
    queries, keys = pick(device, 128, 32), pick(device, 64, 16)
    flops = 4 * heads * length**2 * width
    scores = format_bytes(heads * length**2 * query.element_size())

    def expected() -> torch.Tensor:
        rows = [naive(*(x[head : head + 1].double() for x in (query, key, value))) for head in range(heads)]
        return torch.cat(rows)

    return Exercise(
        "attention",
        "Naive attention against flash",
        "The same FLOPs: naive writes and reads scores and weights for each pair of tokens, and is memory-bound.\n"
        "Flash keeps them on the chip and stores no S x S matrix, so that memory grows with S, not with its square.",
        (
            Variant("naive", lambda: naive(query, key, value), expected, flops=flops, note=f"scores {scores}, twice"),
            Variant(
                "flash", lambda: flash(query, key, value, queries=queries, keys=keys), expected, flops=flops, note="no scores"
            ),
            Variant(
                "torch",
                lambda: F.scaled_dot_product_attention(query[None], key[None], value[None])[0],
                expected,
                flops=flops,
                note="no scores",
            ),
        ),
    )
