"""A GEMM without and with tiles. Each element of A and B is needed N or M times; tiles determine where it is read from."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ultrascale.primer.exercise import Exercise, Variant, launch, narrow, pick, random

COLUMNS = 128


@triton.jit
def _row_by_row(a, b, c, n, k, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < n
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for depth in range(0, k):
        left = tl.load(a + row * k + depth).to(tl.float32)
        total += left * tl.load(b + depth * n + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(c + row * n + columns, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _tiled(a, b, c, m, n, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, k, DEPTH):
        inner = first + depth
        left = tl.load(a + rows * k + inner[None, :], mask=(rows < m) & (inner[None, :] < k), other=0.0)
        right = tl.load(b + inner[:, None] * n + columns, mask=(inner[:, None] < k) & (columns < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows * n + columns, total.to(c.dtype.element_ty), mask=(rows < m) & (columns < n))


def row_by_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[M, K] x [K, N], one program per `COLUMNS` elements of one row, which reads these columns of B for that row alone."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    launch(_row_by_row, (m, triton.cdiv(n, COLUMNS)), a, b, c, n, k, COLUMNS=COLUMNS)
    return c


def tiled(a: torch.Tensor, b: torch.Tensor, *, rows: int, columns: int, depth: int) -> torch.Tensor:
    """[M, K] x [K, N], one program per tile; Triton keeps the tiles of A and B in shared memory and multiplies them there."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    grid = (triton.cdiv(m, rows), triton.cdiv(n, columns))
    launch(_tiled, grid, a, b, c, m, n, k, ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=8 if rows * columns > 4096 else 4)
    return c


def exercise(device: torch.device) -> Exercise:
    """One GEMM, with larger and larger tiles."""
    size = pick(device, 4096, 50)
    a, b = (random(size, size, device=device, dtype=narrow(device), seed=seed) for seed in (1, 2))

    def expected() -> torch.Tensor:
        return a.double() @ b.double()

    flops = 2 * size**3
    sizes = ((32, 32, 32), (64, 64, 32), (128, 128, 64)) if device.type == "cuda" else ((16, 16, 16), (32, 16, 16))
    variants = [Variant("row by row", lambda: row_by_row(a, b), expected, flops=flops)]
    variants += [
        Variant(
            f"tiles of {rows} x {columns}",
            lambda rows=rows, columns=columns, depth=depth: tiled(a, b, rows=rows, columns=columns, depth=depth),
            expected,
            flops=flops,
        )
        for rows, columns, depth in sizes
    ]
    variants.append(Variant("torch", lambda: a @ b, expected, flops=flops))
    return Exercise(
        "tiles",
        "Tiling in shared memory",
        "A tile of T x T reads a number from memory once for T products, not once for each; tensor cores work on tiles only.\n"
        "Row by row is bound by its loads, at about one percent of the peak; the largest tile that fits approaches torch.",
        tuple(variants),
    )
