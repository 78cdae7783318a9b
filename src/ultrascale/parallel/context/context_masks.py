"""Masks of context parallelism: the work of a rank at each hop of the ring, and the keys that must travel for it.

At hop d a rank has the keys and values of the rank d places ahead. It works on *blocks*: a range of its query slots against a
range of those key slots, where all pairs are visible, or the causal half, or those of a mask. Every rank knows the token order
of all ranks, so all of them know without communication which keys are still needed further on: only those travel, and a hop
that nobody needs is skipped.

    plain causal, zigzag, at hop d    ranks earlier in the sequence send their early keys, which all queries see; of ranks
                                      later in the sequence only late queries see the keys, all of them: half a square each,
                                      no mask
    window, one document              a block for each piece of queries, with the keys in reach
    documents                         long documents: one block each, causal on the own rank and full to others: no mask and
                                      no wasted work. Many short documents: one block with a mask over the slots they share,
                                      where that is faster than launching so many kernels. A document that lies on one rank
                                      is in that rank's blocks only (`work.sharding.context_order` puts it last)

Masks are built once per micro-batch and shared by layers, from positions and document ids on the device. A mask has at most
`MOST_MASKED` pairs wherever separate blocks per document can replace it.
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
from ultrascale.work.sharding.context_order import Pieces, VisiblePairs, hull, num_slots, ring_order, span, views

Rows = tuple[tuple[Pieces, ...], ...]
"""Token order of each distinct sequence of the micro-batch: [row][place in the ring]."""
Slots = tuple[int, int]
"""Slot range: the first, and one past the last."""
NOTHING: Slots = (0, 0)
PAIRS_OF_A_CALL = 1 << 19
"""Query-key pairs computed in the time of one more kernel launch: with 32 heads of 128 they are 9 GFLOP, 30 microseconds at 300
TFLOP/s. By arithmetic, not measured."""
MOST_MASKED = 1 << 24
"""Most query-key pairs of a document mask: 32 MB in bf16, one for each window and micro-batch in flight."""


@dataclass(frozen=True)
class KernelCall:
    """Queries and keys of one kernel call."""

    queries: slice
    keys: slice
    """Key slots on the rank that holds them."""
    mask: Tensor | None
    """Tensor [1 or B, 1, queries, keys], added to scores; None if no mask is needed beyond causality."""
    is_causal: bool
    sequences: slice
    """Sequences of the micro-batch that the block covers."""


@dataclass(frozen=True)
class ContextMask:
    """The work of one rank of a ring, and the keys and values that each hop needs."""

    hops: tuple[tuple[KernelCall, ...], ...]
    """Blocks at each hop d, against the keys of place (own + d) % n."""
    lengths: tuple[int, ...]
    """Number of slots of each place."""
    needs: tuple[tuple[Slots, ...], ...]
    """[source][d]: keys of `source` that are used at hop d, by the place d before it."""

    def travels(self, source: int, distance: int) -> Slots:
        """Keys of `source` that are needed at hop `distance` or later."""
        return _span(self.needs[source][distance:])

    def gathered(self, source: int, distance: int) -> Slots:
        """Keys of `source` whose gradients other ranks have contributed to once hop `distance` is done."""
        return _span(self.needs[source][1 : distance + 1])

    def last_hop(self, source: int) -> int:
        """Last hop at which any rank needs keys of `source`."""
        return max((d for d, need in enumerate(self.needs[source]) if need != NOTHING), default=0)


def document_rows(document_ids: NDArray[np.integer], ring: int) -> Rows:
    """Token order of each sequence of `document_ids` [B, S]; a single order if every sequence is one document."""
    length = document_ids.shape[1]
    if length and (document_ids == document_ids[:, :1]).all():
        return (ring_order(length, ring),)
    breaks = document_ids[:, 1:] != document_ids[:, :-1]
    return tuple(ring_order(length, ring, (0, *(np.flatnonzero(row) + 1).tolist())) for row in breaks)


def positions_of(pieces: Pieces) -> NDArray[np.int64]:
    """Positions in the sequence of the tokens in a rank's slots, [slots]."""
    return np.concatenate([np.arange(start, stop) for start, stop, _ in pieces] or [np.empty(0, dtype=np.int64)])


class WholeDocuments(NamedTuple):
    """Document ids of whole sequences and the token order that follows from them, computed once."""

    ids: Tensor
    """Document ids [B, S], on the CPU."""
    rows: Rows


class Documents:
    """`WholeDocuments` wrapped so that FSDP2 leaves it on the CPU: it moves tensors, and tuples of them, to the device."""

    def __init__(self, ids: Tensor, ring: int):
        self.whole = WholeDocuments(ids, document_rows(ids.numpy(), ring))


def whole_documents(documents: Tensor | Documents, ring: int) -> WholeDocuments:
    """`WholeDocuments` from either form; document ids on a device are copied to the host, which waits for them."""
    return (documents if isinstance(documents, Documents) else Documents(documents.cpu(), ring)).whole


def context_mask(
    rows: Rows, place: int, *, document_ids: Tensor | None, window: int | None, dtype: torch.dtype, device: torch.device
) -> ContextMask:
    """Mask for `place` of the ring. `document_ids` [B, S] on the CPU: required if `rows` have more than one document."""
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
            blocks.append(KernelCall(slice(*view.queries), slice(*view.keys), mask, is_causal, sequences))
        hops.append(tuple(blocks))
    return ContextMask(tuple(hops), tuple(num_slots(pieces) for pieces in rows[0]), _needs(rows, window))


class _MaskPart(NamedTuple):
    sequences: slice
    view: VisiblePairs
    is_causal: bool


@lru_cache(maxsize=256)
def _blocks(rows: Rows, place: int, source: int, window: int | None) -> tuple[_MaskPart, ...]:
    """Blocks of the queries of `place` against the keys of `source`."""
    alone = [[*_of_documents(order, place, source, window, _sequence(rows, row))] for row, order in enumerate(rows)]
    if len(rows) == 1 and len({piece.document for pieces in rows[0] for piece in pieces}) == 1:
        return tuple(alone[0])
    hulls = [hull([part.view for part in parts]) for parts in alone if parts]
    if not hulls:
        return ()
    queries, keys = span([view.queries for view in hulls]), span([view.keys for view in hulls])
    all_alike = len(hulls) == len(rows) and all(view == VisiblePairs(queries, keys, True) for view in hulls)
    together = _MaskPart(slice(None), VisiblePairs(queries, keys, all_alike), False)
    parts = tuple(part for parts in alone for part in parts)
    pairs = len(rows) * (queries[1] - queries[0]) * (keys[1] - keys[0])
    masked = len(parts) > 1 and pairs <= min(len(parts) * PAIRS_OF_A_CALL, MOST_MASKED)
    return (together,) if all_alike or masked else parts


def _sequence(rows: Rows, row: int) -> slice:
    return slice(None) if len(rows) == 1 else slice(row, row + 1)


def _of_documents(
    order: tuple[Pieces, ...], place: int, source: int, window: int | None, sequences: slice
) -> Iterator[_MaskPart]:
    """Blocks of one sequence, document by document."""
    if place != source or window is not None:
        yield from (_MaskPart(sequences, view, False) for view in views(order[place], order[source], window))
        return
    slot = 0
    for _, pieces in groupby(order[place], key=lambda piece: piece.document):  # its slots are in the order of its positions
        slots = (slot, slot + num_slots(tuple(pieces)))
        slot = slots[1]
        yield _MaskPart(sequences, VisiblePairs(slots, slots, False), True)


@lru_cache(maxsize=64)
def _needs(rows: Rows, window: int | None) -> tuple[tuple[Slots, ...], ...]:
    """Computes `ContextMask.needs`: the key ranges for all pairs of pieces of one document, vectorised."""
    ring = len(rows[0])
    first, stop = np.full((ring, ring), np.iinfo(np.int64).max), np.zeros((ring, ring), dtype=np.int64)
    for order in rows:
        place, start, end, document, slot = _pieces(order)
        _, of_piece, sizes = np.unique(document, return_inverse=True, return_counts=True)
        each = sizes[of_piece]  # number of pieces of its document, which are adjacent
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
    """All pieces, grouped by document, as arrays: place, start, stop, document, first slot."""
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
    view: VisiblePairs,
    document_ids: Tensor | None,
    window: int | None,
    device: torch.device,
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
