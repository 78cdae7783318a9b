"""The state of an island as unsharded tensors, for islands with another dp, whose ranks hold other shards.

    giver    each rank writes the boxes that it is the first to hold into zeros of the full shape; their sum is the tensor
    line     from rank 0 to rank 0, one tensor at a time
    taker    rank 0 has the received tensor and the others zeros; their sum is the tensor, and each rank cuts its boxes from it

Sums are of bytes, so that every bit is preserved. Host memory holds one unsharded tensor at a time on each rank. Islands with
equal dp send rank to rank instead (`outer_loop`), with as many connections at once as there are ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from ultrascale.checkpoint.slices import Slice
from ultrascale.islands.link import Group, LostIslandError
from ultrascale.parallel.mesh import Ranks

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape of a slice."""


def hand_over(
    ranks: Ranks, group: Group | None, leader: int, tensors: Mapping[str, Sequence[Slice]], *, gives: bool, takes: bool
) -> None:
    """Send `tensors` from member `leader` of `group` to the islands that take them; all ranks of each island call it.

    `group`: rank 0's group with the other islands; None on another rank. Raises LostIslandError on a rank 0 whose group fails;
    a giver raises at the end, once its other ranks have finished.
    """
    by_rank = ranks.gather_json({name: _description(some) for name, some in tensors.items()})
    lost: LostIslandError | None = None
    for name in sorted({name for some in by_rank for name in some}):
        (shape, dtype, _), *_ = (some[name] for some in by_rank if name in some)
        whole = torch.zeros(shape, dtype=getattr(torch, dtype))
        flat = whole.view(-1).view(torch.uint8)
        before = [_boxes(some[name][2]) for some in by_rank[: ranks.rank] if name in some]
        if gives:
            covered = {box for some in by_rank if name in some for box in _boxes(some[name][2])}
            assert sum(prod(box[1]) for box in covered) == whole.numel(), f"{name} is not held whole, or is held twice"
            for part in tensors.get(name, ()):
                if not any(_box(part) in boxes for boxes in before):
                    whole[_index(part)] = part.tensor.to(whole.device)
            ranks.sum(flat)
        if group is not None and lost is None:
            try:
                group.broadcast(whole, leader)
            except LostIslandError as error:
                if not gives:
                    raise
                lost = error
        if takes:
            if group is None:
                whole.zero_()
            ranks.sum(flat)
            for part in tensors.get(name, ()):
                part.tensor.copy_(whole[_index(part)])
    if lost is not None:
        raise lost


def _description(slices: Sequence[Slice]) -> tuple[tuple[int, ...], str, list[Box]]:
    """Shape and dtype of the unsharded tensor, and its boxes."""
    dtype = str(slices[0].tensor.dtype).removeprefix("torch.")
    return slices[0].shape, dtype, [_box(part) for part in slices if part.tensor.numel()]


def _box(part: Slice) -> Box:
    return tuple(part.offsets), tuple(part.tensor.shape)


def _boxes(pairs: list[list[list[int]]]) -> set[Box]:
    return {(tuple(offsets), tuple(shape)) for offsets, shape in pairs}


def _index(part: Slice) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(part.offsets, part.tensor.shape, strict=True))
