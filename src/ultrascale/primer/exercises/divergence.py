"""Control divergence: the 32 threads of a warp execute one instruction at a time; if they diverge, both branches."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ultrascale.primer.exercise import Exercise, Variant, launch, pick, random

BLOCK = 256
ROUNDS = 512
"""Steps of each branch: enough that memory does not matter."""
UP, DOWN = (0.999, 0.001), (0.998, -0.002)
"""Factor and addend of each branch."""


@triton.jit
def _rounds(values, factor, addend, ROUNDS: tl.constexpr):
    for _ in range(0, ROUNDS):
        values = values * factor + addend
    return values


@triton.jit
def _lanes_disagree(x, out, count, up, more, down, less, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + index, mask=index < count, other=0.0)
    both = tl.where(index % 2 == 0, _rounds(values, up, more, ROUNDS), _rounds(values, down, less, ROUNDS))
    tl.store(out + index, both, mask=index < count)


@triton.jit
def _programs_disagree(x, out, count, up, more, down, less, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + index, mask=index < count, other=0.0)
    if tl.program_id(0) % 2 == 0:  # noqa: SIM108  a branch is the subject of this lesson
        values = _rounds(values, up, more, ROUNDS)
    else:
        values = _rounds(values, down, less, ROUNDS)
    tl.store(out + index, values, mask=index < count)


def branch(x: torch.Tensor, rounds: int, *, by_lane: bool) -> torch.Tensor:
    """Every second element (or block of 256) takes one branch, the others the other."""
    out = torch.empty_like(x)
    kernel = _lanes_disagree if by_lane else _programs_disagree
    launch(kernel, (triton.cdiv(x.numel(), BLOCK),), x, out, x.numel(), *UP, *DOWN, ROUNDS=rounds, BLOCK=BLOCK)
    return out


def exercise(device: torch.device) -> Exercise:
    """Two computations on the same number of elements each, chosen by lane and by program."""
    count, rounds = pick(device, 2**24, 1000), pick(device, ROUNDS, 8)
    x = random(count, device=device)

    def expected(by_lane: bool) -> torch.Tensor:
        index = torch.arange(count, device=device)
        goes_up = (index if by_lane else index // BLOCK) % 2 == 0
        values = x.double()
        for _ in range(rounds):
            values = torch.where(goes_up, values * UP[0] + UP[1], values * DOWN[0] + DOWN[1])
        return values

    return Exercise(
        "divergence",
        "Control divergence",
        "With a branch per lane each thread executes both sides and keeps one; with a branch per program, only its own.\n"
        "Half the rate for the same result: data are sorted (tokens by expert, blocks by mask) so that neighbours agree.",
        tuple(
            Variant(
                name,
                lambda by_lane=by_lane: branch(x, rounds, by_lane=by_lane),
                lambda by_lane=by_lane: expected(by_lane),
                flops=2 * rounds * count,
            )
            for name, by_lane in (("neighbours disagree", True), ("programs disagree", False))
        ),
    )
