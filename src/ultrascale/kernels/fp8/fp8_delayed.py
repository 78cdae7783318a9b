"""Delayed scaling (Micikevicius et al. 2022; Transformer Engine): scales from the largest magnitudes of earlier steps.

    current    largest of x, then a scale, then x is rounded     over ranks a message between them
    delayed    x is rounded by the scale that is there, and its largest magnitude is noted for later steps; no message

What is larger than all that its history knows saturates: it becomes the format's largest number, and from the next step on the
scale has room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.fp8.fp8_matrices import Narrow, largest_of, rounded


class Places(NamedTuple):
    """Slots of one call: of what it reads, of its weights, and of the gradients of their results."""

    input: int
    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    count: int = 1
    """Slots of each: experts."""


class Kept(NamedTuple):
    """Scales of a block, and where its largest magnitudes of this step are noted."""

    places: Places
    scales: Tensor | None
    """[slots] fp32; None: there is no history yet, and scales are those of the numbers at hand."""
    largest: Tensor | None
    """[slots] fp32; None: nothing is noted, as in evaluations."""


def scale_of(scales: Tensor, place: int, count: int = 1) -> Tensor:
    """[1, 1], or of experts [X, 1, 1]."""
    return scales[place : place + 1].view(1, 1) if count == 1 else scales[place : place + count].view(-1, 1, 1)


def round_by(scales: Tensor, wides: Sequence[Tensor], places: Sequence[int], dtype: torch.dtype) -> list[Narrow]:
    """Matrices rounded by the scales that are there."""
    return [rounded(wide, scale_of(scales, place), dtype) for wide, place in zip(wides, places, strict=True)]


def with_notes(found: list[Narrow], largest: Tensor | None, wides: Sequence[Tensor], places: Sequence[int]) -> list[Narrow]:
    """`found`, once the largest magnitude of each of `wides` is noted, if somebody asks for it."""
    if largest is None:
        return found
    magnitudes = [largest_of(wide, "tensor").view(1).float() for wide in wides]
    scales = noted([one.scale for one in found], largest, magnitudes, list(places))
    return [Narrow(one.values, scale) for one, scale in zip(found, scales, strict=True)]


@custom_op("ultrascale::noted", mutates_args=())
def noted(scales: list[Tensor], largest: Tensor, found: list[Tensor], places: list[int]) -> list[Tensor]:
    """Copies of `scales`; on the way `largest` keeps what is larger of itself and of each of `found`, [n] at its place.

    The compiler is not told that `largest` is written: it would hold its version to what it was in the forward pass, and other
    micro-batches write it before the backward pass. To note twice, or in another order, changes nothing, nothing in a graph
    reads it, and who uses the copies cannot be left out.
    """
    for one, place in zip(found, places, strict=True):
        kept = largest.data[place : place + len(one)]  # of data: without counting versions
        torch.maximum(kept, one, out=kept)
    return [scale.clone() for scale in scales]


@noted.register_fake
def _(scales: list[Tensor], largest: Tensor, found: list[Tensor], places: list[int]) -> list[Tensor]:
    return [torch.empty_like(scale) for scale in scales]
