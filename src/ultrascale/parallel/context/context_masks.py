"""Masks of context parallelism: what a rank works on at each hop of the ring, and what has to travel for it.

At hop d a rank meets the keys and values of the rank d places on. It works on *blocks*: slots of its queries against slots of
those keys, all of which see each other, or causally, or with a mask. Every rank knows every order, so all of them know
without a word which keys anybody still needs further on: only those travel, and a hop that nobody needs is not made.

    plain causal, zigzag, at hop d    to ranks before it in the sequence a rank needs all their early keys; to ranks after it
                                      only its late queries see anything, and they see all: half a square each, no mask
    window, one document              a block for each piece of queries, with the keys in reach
    documents                         of long ones a block each, causal on one's own rank and whole to others: no mask, and no
                                      work for nothing. Many short ones: one block with a mask, as large as what they share,
                                      where the kernel works through it sooner than so many blocks could be started. What is
                                      whole on one rank is in none but its own (`work.sharding.context_order` puts it last)

Masks are made once per micro-batch and shared by layers, from positions and documents on the device, and are never of more than
`MOST_MASKED` pairs where blocks of documents can do without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ultrascale.kernels.attention.attention_with_lse import additive_mask
from ultrascale.work.sharding.context_order import Pieces, View, hull, num_slots, ring_order, span, views

Rows = tuple[tuple[Pieces, ...], ...]
"""The order of each distinct sequence of the micro-batch: [row][place in the ring]."""
Slots = tuple[int, int]
"""First, and one past the last."""
NOTHING: Slots = (0, 0)
PAIRS_OF_A_CALL = 1 << 19
"""Pairs of a query and a key that are worked through while one more kernel is started: with 32 heads of 128 they are 9 GFLOP,
30 microseconds at 300 TFLOP/s. By arithmetic; nothing was measured."""
MOST_MASKED = 1 << 24
"""Pairs that a mask of documents may have: 32 MB in bf16, one for each window and micro-batch under way."""


@dataclass(frozen=True)
class Block:
    """Queries and keys that are worked on by one call of a kernel."""

    queries: slice
    keys: slice
    """Slots of the rank that holds them."""
    mask: Tensor | None
    """[1 or B, 1, queries, keys], added to scores."""
    is_causal: bool
    sequences: slice
    """Sequences of the micro-batch."""


@dataclass(frozen=True)
class ContextMask:
    """The work of one place of a ring, and the ranks that need its keys and values."""

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
    """Positions in the sequence of the tokens in a rank's slots, [slots]."""
    return np.concatenate([np.arange(start, stop) for start, stop, _ in pieces] or [np.empty(0, dtype=np.int64)])


class WholeDocuments(NamedTuple):
    """Document ids of whole sequences, and the order that follows from them: worked out once, whoever asks."""

    ids: Tensor
    """[B, S] on the CPU."""
    rows: Rows


class Documents:
    """`WholeDocuments` in an object that FSDP2, which takes all tensors and tuples of them to the device, leaves on the CPU."""

    def __init__(self, ids: Tensor, ring: int):
        self.whole = WholeDocuments(ids, document_rows(ids.numpy(), ring))


def whole_documents(documents: Tensor | Documents, ring: int) -> WholeDocuments:
    """The documents in either form; ids on a device are waited for."""
    return (documents if isinstance(documents, Documents) else Documents(documents.cpu(), ring)).whole


def context_mask(
    rows: Rows, place: int, *, document_ids: Tensor | None, window: int | None, dtype: torch.dtype, device: torch.device
) -> ContextMask:
    """The mask of `place` of the ring. `document_ids` [B, S] on the CPU: needed where `rows` have more than one document."""
    ring = len(rows[0])
    hops = []
    for distance in range(ring):
        source = (place + distance) % ring
        blocks = []
        for sequences, view, is_causal in _blocks(rows, place, source, window):
            mask = None
            if not (view.is_full or is_causal):
                chosen = document_ids if document_ids is None else document_ids[sequences]
                mask = additive_mask(_visible(rows[sequences], place, source, view, chosen, window, device), dtype)
            blocks.append(Block(slice(*view.queries), slice(*view.keys), mask, is_causal, sequences))
        hops.append(tuple(blocks))
    return ContextMask(tuple(hops), tuple(num_slots(pieces) for pieces in rows[0]), _needs(rows, window))


class _Part(NamedTuple):
    sequences: slice
    view: View
    is_causal: bool


@lru_cache(maxsize=256)
def _blocks(rows: Rows, place: int, source: int, window: int | None) -> tuple[_Part, ...]:
    """The blocks of queries of `place` and keys of `source`."""
    alone = [[*_of_documents(order, place, source, window, _sequence(rows, row))] for row, order in enumerate(rows)]
    if len(rows) == 1 and len({piece.document for pieces in rows[0] for piece in pieces}) == 1:
        return tuple(alone[0])
    hulls = [hull([part.view for part in parts]) for parts in alone if parts]
    if not hulls:
        return ()
    queries, keys = span([view.queries for view in hulls]), span([view.keys for view in hulls])
    all_alike = len(hulls) == len(rows) and all(view == View(queries, keys, True) for view in hulls)
    together = _Part(slice(None), View(queries, keys, all_alike), False)
    parts = tuple(part for parts in alone for part in parts)
    pairs = len(rows) * (queries[1] - queries[0]) * (keys[1] - keys[0])
    masked = len(parts) > 1 and pairs <= min(len(parts) * PAIRS_OF_A_CALL, MOST_MASKED)
    return (together,) if all_alike or masked else parts


def _sequence(rows: Rows, row: int) -> slice:
    return slice(None) if len(rows) == 1 else slice(row, row + 1)


def _of_documents(order: tuple[Pieces, ...], place: int, source: int, window: int | None, sequences: slice) -> Iterator[_Part]:
    """The blocks of one sequence, document by document."""
    if place != source or window is not None:
        yield from (_Part(sequences, view, False) for view in views(order[place], order[source], window))
        return
    slot = 0
    for _, pieces in groupby(order[place], key=lambda piece: piece.document):  # its slots are in the order of its positions
        slots = (slot, slot + num_slots(tuple(pieces)))
        slot = slots[1]
        yield _Part(sequences, View(slots, slots, False), True)


@lru_cache(maxsize=64)
def _needs(rows: Rows, window: int | None) -> tuple[tuple[Slots, ...], ...]:
    """`ContextMask.needs`: the spans of keys of all pairs of pieces of a document, all at once."""
    ring = len(rows[0])
    first, stop = np.full((ring, ring), np.iinfo(np.int64).max), np.zeros((ring, ring), dtype=np.int64)
    for order in rows:
        place, start, end, document, slot = _pieces(order)
        _, of_piece, sizes = np.unique(document, return_inverse=True, return_counts=True)
        each = sizes[of_piece]  # pieces of its document; they lie together
        query = np.repeat(np.arange(len(place)), each)
        begins = np.cumsum(sizes) - sizes
        key = np.arange(len(query)) - np.repeat(np.cumsum(each) - each, each) + begins[of_piece[query]]
        reach = end[query] if window is None else window
        first_query, last_key = np.maximum(start[query], start[key]), np.minimum(end[key], end[query]) - 1
        first_key = np.maximum(start[key], first_query - reach + 1)
        sees = (first_query < end[query]) & (first_key <= last_key)
        query, key, first_key, last_key = (array[sees] for array in (query, key, first_key, last_key))
        pair, move = (place[key], place[query]), slot[key] - start[key]
        np.minimum.at(first, pair, first_key + move)
        np.maximum.at(stop, pair, last_key + move + 1)
    spans = np.where((stop > 0)[..., None], np.stack((first, stop), axis=-1), 0).tolist()
    return tuple(tuple((lo, hi) for lo, hi in (spans[k][(k - d) % ring] for d in range(ring))) for k in range(ring))


def _pieces(order: tuple[Pieces, ...]) -> tuple[NDArray[np.int64], ...]:
    """All pieces, those of a document together: place, start, stop, document, first slot."""
    table: list[tuple[int, int, int, int, int]] = []
    for place, pieces in enumerate(order):
        slot = 0
        for piece in pieces:
            table.append((place, piece.start, piece.stop, piece.document, slot))
            slot += piece.stop - piece.start
    table.sort(key=lambda row: row[3])
    return tuple(np.array(table, dtype=np.int64).reshape(-1, 5).T)


def _visible(
    rows: Rows,
    place: int,
    source: int,
    view: View,
    document_ids: Tensor | None,
    window: int | None,
    device: torch.device | None = None,
) -> Tensor:  # [1 or B, queries, keys], booleans
    at_queries, at_keys = _positions(rows, place, view.queries), _positions(rows, source, view.keys)  # [1 or B, slots]
    queries, keys = at_queries.to(device).unsqueeze(2), at_keys.to(device).unsqueeze(1)
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    if document_ids is not None and len({piece.document for order in rows for pieces in order for piece in pieces}) > 1:
        ids = document_ids.long()
        query_ids, key_ids = (ids.gather(1, at.expand(len(ids), -1)).to(device) for at in (at_queries, at_keys))
        visible = visible & (query_ids.unsqueeze(2) == key_ids.unsqueeze(1))
    return visible


def _positions(rows: Rows, place: int, slots: Slots) -> Tensor:
    return torch.from_numpy(np.stack([positions_of(order[place])[slice(*slots)] for order in rows]))


def _span(ranges: Sequence[Slots]) -> Slots:
    return span([slots for slots in ranges if slots != NOTHING])
