"""Thread coarsening: the amount of work per program. Starting one has a cost, and loaded data can serve more than one row."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ultrascale.primer.exercise import Exercise, Variant, launch, pick, random

BLOCK = 256
ROWS = (1, 2, 4, 16, 64)


@triton.jit
def _scale_columns(x, weights, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weights + columns, mask=inside)
    for step in range(0, ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + step
        mask = inside & (row + tl.zeros_like(columns) < rows)  # as wide as the block: interpreters need more than one bit
        tl.store(out + row * width + columns, tl.load(x + row * width + columns, mask=mask) * scale, mask=mask)


def scale_columns(x: torch.Tensor, weights: torch.Tensor, *, rows_each: int) -> torch.Tensor:
    """[R, W] times [W], `rows_each` rows of a block of columns to a program."""
    (rows, width), out = x.shape, torch.empty_like(x)
    grid = (triton.cdiv(rows, rows_each), triton.cdiv(width, BLOCK))
    launch(_scale_columns, grid, x, weights, out, rows, width, ROWS=rows_each, BLOCK=BLOCK, num_warps=4)
    return out


def exercise(device: torch.device) -> Exercise:
    """One set of rows, computed by fewer and fewer programs."""
    rows, width = pick(device, 2**16, 70), pick(device, 1024, 300)
    x, weights = random(rows, width, device=device), random(width, device=device, seed=1)
    return Exercise(
        "coarsening",
        "Thread coarsening",
        "With one row per program the weights are loaded again for every row, and starting programs dominates.\n"
        "Several rows per program approach the memory bandwidth; too many leave multiprocessors idle, few loads in flight.",
        tuple(
            Variant(
                f"{count} rows a program" if count > 1 else "1 row a program",
                lambda count=count: scale_columns(x, weights, rows_each=count),
                lambda: x.double() * weights.double(),
                num_bytes=(2 * x.numel() + width) * x.element_size(),
            )
            for count in ROWS
        ),
    )
