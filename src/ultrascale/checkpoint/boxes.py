"""Matching of the boxes of all ranks: rank 0 decides, from each rank's offers.

The boxes of a tensor must cover it, each element once. Equal boxes are replicas (data-parallel replicas, key/value heads that
several ranks hold, the tied embedding at both ends of a pipeline), and one of them is written; other overlaps are errors. We do
not use DCP's planner because it identifies a box by its offsets alone, and treats boxes of different sizes as replicas.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from math import prod
from typing import Any, NamedTuple

from ultrascale.checkpoint.disk.dtypes import DTYPE_NAMES, DTYPES
from ultrascale.checkpoint.disk.files import Piece, view_bytes
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.manifest import overlapping_boxes

DIGEST_BYTES = 16
SMALL = 10_000
"""Boxes smaller than 1/`SMALL` of a rank's average bytes are not balanced."""


class Offer(NamedTuple):
    """A box that a rank holds or wants, in JSON-able form."""

    name: str
    dtype: str
    shape: list[int]
    """Shape of the unsharded tensor."""
    offsets: list[int]
    sizes: list[int]
    digest: str | None
    """Digest of the box's bits, if replicas are compared."""


class Box(NamedTuple):
    """A box of a tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Holder(NamedTuple):
    """A rank that offers a box."""

    rank: int
    index: int
    """Index among the rank's offers."""


def offer_of(piece: Piece, *, with_digest: bool = False) -> Offer:
    """The offer that describes a piece to rank 0."""
    digest = hashlib.blake2b(view_bytes(piece.tensor), digest_size=DIGEST_BYTES).hexdigest() if with_digest else None
    sizes = list(piece.tensor.shape)
    return Offer(piece.name, DTYPE_NAMES[piece.tensor.dtype], list(piece.shape), list(piece.offsets), sizes, digest)


def fit_together(offers: list[list[Offer]]) -> dict[Box, list[Holder]]:
    """The holders of each box, from every rank's offers. Raises CheckpointError unless the boxes of each tensor cover it
    exactly once, not counting replicas, and replicas have equal digests."""
    heads: dict[str, tuple[str, list[int]]] = {}
    holders: dict[Box, list[Holder]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        for index, part in enumerate(offer):
            head = (part.dtype, part.shape)
            if heads.setdefault(part.name, head) != head:
                problem = f"rank {rank} has {part.dtype} {part.shape}, a lower rank {heads[part.name]}"
                raise CheckpointError(f"{part.name}: {problem}; expected the same dtype and global shape on all ranks.")
            holders[Box(part.name, tuple(part.offsets), tuple(part.sizes))].append(Holder(rank, index))
    _expect_cover({name: shape for name, (_, shape) in heads.items()}, list(holders))
    for box, several in holders.items():
        _expect_copies(box, several, offers)
    return holders


def share_out(offers: list[list[Offer]]) -> list[list[int]]:
    """For every rank the indices of the boxes that it writes: each box is written once, bytes balanced over the ranks. Replicas
    too small to matter (biases of experts, tables of scales) go to the lowest rank that holds them: if they were spread over
    all ranks, every node of a later start would have to fetch every rank's file.

    Raises as `fit_together` does.
    """
    holders = fit_together(offers)
    sizes = {
        box: prod(box.sizes) * DTYPES[offers[several[0].rank][several[0].index].dtype].itemsize
        for box, several in holders.items()
    }
    small = sum(sizes.values()) / (SMALL * max(1, len(offers)))
    taken, items = [0] * len(offers), [[] for _ in offers]
    # Boxes with one holder first, then the largest, each to the holder with the fewest bytes so far.
    for box, several in sorted(holders.items(), key=lambda entry: (len(entry[1]) > 1, -sizes[entry[0]])):
        chosen = several[0] if sizes[box] < small else min(several, key=lambda holder: taken[holder.rank])
        taken[chosen.rank] += sizes[box]
        items[chosen.rank].append(chosen.index)
    return [sorted(indices) for indices in items]


def _expect_cover(shapes: dict[str, list[int]], boxes: list[Box]) -> None:
    of_tensor: dict[str, list[Box]] = defaultdict(list)
    for box in boxes:
        of_tensor[box.name].append(box)
    for name, shape in shapes.items():
        covered = sum(prod(box.sizes) for box in of_tensor[name])
        clash = overlapping_boxes([(box.offsets, box.sizes) for box in of_tensor[name]])
        problem = f"boxes {clash} overlap" if clash else f"{covered} of {prod(shape)} elements are on some rank"
        if clash or covered != prod(shape):
            where = f"the ranks' shards do not fit together: {name} {shape}: {problem}"
            raise CheckpointError(f"{where}. Every element must be on some rank, in one box; copies in equal boxes.")


def _expect_copies(box: Box, several: list[Holder], offers: list[list[Offer]]) -> None:
    ranks: dict[Any, list[int]] = defaultdict(list)
    for holder in several:
        ranks[offers[holder.rank][holder.index].digest].append(holder.rank)
    if len(ranks) > 1:
        groups = " and ".join(f"ranks {members}" for members in ranks.values())
        raise CheckpointError(f"{box.name} at {list(box.offsets)}: {groups} hold different numbers, expected copies.")
