"""Who sees whom under context parallelism: what a rank works on at each hop of the ring, and what has to travel for it.

At hop d a rank meets the keys and values of the rank d places on. It works on *blocks*: slots of its queries against slots of
those keys, all of which see each other, or causally, or with a mask. Every rank knows every order, so all of them know
without a word which keys anybody still needs further on: only those travel, and a hop that nobody needs is not made.

    plain causal, zigzag, at hop d    to ranks before it in the sequence a rank needs all their early keys; to ranks after it
                                      only its late queries see anything, and they see all: half a square each, no mask
    window, one document              a block for each piece of queries, with the keys in reach
    documents                         one block with a mask, as large as what documents share; what is whole on one rank is in
                                      none but its own (`spec.context_order` puts it last)

Masks are made once per micro-batch and shared by layers: in all hops together B S/n S numbers at most, as many as one rank's
share of what one process has; with documents the kernel works through them, seen or not, as it does there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ultrascale.kernels.attention_with_lse import additive_mask
from ultrascale.spec.context_order import Pieces, View, hull, num_slots, ring_order, span, views

Rows = tuple[tuple[Pieces, ...], ...]
"""The order of each distinct sequence of the micro-batch: [row][place in the ring]."""
Slots = tuple[int, int]
"""First, and one past the last."""
NOTHING: Slots = (0, 0)


@dataclass(frozen=True)
class Block:
    """Queries and keys that are worked on by one call of a kernel."""

    queries: slice
    keys: slice
    """Slots of the rank that holds them."""
    mask: Tensor | None
    """[1 or B, 1, queries, keys], added to scores."""
    is_causal: bool


@dataclass(frozen=True)
class ContextMask:
    """What one place of a ring works on, and who needs what."""

    hops: tuple[tuple[Block, ...], ...]
    """Blocks at hop d: with keys of place (own + d) % n."""
    lengths: tuple[int, ...]
    """Slots of each place."""
    needs: tuple[tuple[Slots, ...], ...]
    """[source][d]: keys of `source` that the place d before it works on, at hop d."""

    def travels(self, source: int, distance: int) -> Slots:
        """Keys of `source` that are needed at hop `distance` or later."""
        return _span(self.needs[source][distance:])

    def gathered(self, source: int, distance: int) -> Slots:
        """Keys of `source` whose gradients the other ranks have touched once hop `distance` is done."""
        return _span(self.needs[source][1 : distance + 1])

    def last_hop(self, source: int) -> int:
        """The last at which anybody needs keys of `source`."""
        return max((d for d, need in enumerate(self.needs[source]) if need != NOTHING), default=0)


def document_rows(document_ids: NDArray[np.integer], ring: int) -> Rows:
    """The order of each sequence of `document_ids` [B, S]; one for all where all are one document."""
    length = document_ids.shape[1]
    if length and (document_ids == document_ids[:, :1]).all():
        return (ring_order(length, ring),)
    breaks = document_ids[:, 1:] != document_ids[:, :-1]
    return tuple(ring_order(length, ring, (0, *(np.flatnonzero(row) + 1).tolist())) for row in breaks)


def positions_of(pieces: Pieces) -> NDArray[np.int64]:
    """Where in the sequence the tokens in a rank's slots are, [slots]."""
    return np.concatenate([np.arange(start, stop) for start, stop, _ in pieces] or [np.empty(0, dtype=np.int64)])


def context_mask(
    rows: Rows, place: int, *, document_ids: Tensor | None, window: int | None, dtype: torch.dtype, device: torch.device
) -> ContextMask:
    """What `place` of the ring works on. `document_ids` [B, S] on the CPU: needed where `rows` have more than one document."""
    plan, ring = _plan(rows, window), len(rows[0])
    hops = []
    for distance in range(ring):
        source = (place + distance) % ring
        blocks = []
        for view in plan.blocks[place][source]:
            is_causal = source == place and view is _CAUSAL
            if is_causal:
                blocks.append(Block(slice(0, plan.lengths[place]), slice(0, plan.lengths[place]), None, True))
                continue
            mask = None
            if not view.is_full:
                visible = _visible(rows, place, source, view, document_ids, window).to(device)
                mask = additive_mask(visible, dtype)
            blocks.append(Block(slice(*view.queries), slice(*view.keys), mask, False))
        hops.append(tuple(blocks))
    return ContextMask(tuple(hops), plan.lengths, plan.needs)


@dataclass(frozen=True)
class _Plan:
    """The same of all places, without tensors."""

    blocks: tuple[tuple[tuple[View, ...], ...], ...]
    """[place of queries][place of keys]."""
    lengths: tuple[int, ...]
    needs: tuple[tuple[Slots, ...], ...]


_CAUSAL = View((-1, -1), (-1, -1), False)
"""Stands for all of a rank's own slots under the plain causal mask."""


@lru_cache(maxsize=64)
def _plan(rows: Rows, window: int | None) -> _Plan:
    ring = len(rows[0])
    blocks = tuple(tuple(_views(rows, place, source, window) for source in range(ring)) for place in range(ring))
    needs = tuple(
        tuple(_span([view.keys for view in blocks[(source - d) % ring][source]]) for d in range(ring)) for source in range(ring)
    )
    return _Plan(blocks, tuple(num_slots(pieces) for pieces in rows[0]), needs)


def _views(rows: Rows, place: int, source: int, window: int | None) -> tuple[View, ...]:
    """The blocks of queries of `place` and keys of `source`."""
    one_document = len(rows) == 1 and len({piece.document for pieces in rows[0] for piece in pieces}) == 1
    if place == source and one_document and window is None:
        return (_CAUSAL,)
    of_rows = [views(order[place], order[source], window) for order in rows]
    if one_document:
        return tuple(of_rows[0])
    some = [hull(row) for row in of_rows if row]
    if not some:
        return ()
    queries, keys = span([view.queries for view in some]), span([view.keys for view in some])
    all_alike = len(some) == len(rows) and all(view == View(queries, keys, True) for view in some)
    return (View(queries, keys, all_alike),)


def _visible(
    rows: Rows, place: int, source: int, view: View, document_ids: Tensor | None, window: int | None
) -> Tensor:  # [1 or B, queries, keys], booleans
    queries = _positions(rows, place, view.queries).unsqueeze(2)  # [1 or B, queries, 1]
    keys = _positions(rows, source, view.keys).unsqueeze(1)  # [1 or B, 1, keys]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    if document_ids is not None and len({piece.document for order in rows for pieces in order for piece in pieces}) > 1:
        ids = document_ids.long()
        query_ids, key_ids = (ids.gather(1, at.flatten(1).expand(len(ids), -1)) for at in (queries, keys))
        visible = visible & (query_ids.unsqueeze(2) == key_ids.unsqueeze(1))
    return visible


def _positions(rows: Rows, place: int, slots: Slots) -> Tensor:
    return torch.from_numpy(np.stack([positions_of(order[place])[slice(*slots)] for order in rows]))


def _span(ranges: Sequence[Slots]) -> Slots:
    return span([slots for slots in ranges if slots != NOTHING])
