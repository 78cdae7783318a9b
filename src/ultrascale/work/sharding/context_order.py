"""Token order of context parallelism: the positions of a sequence that each rank holds, and which of the other ranks' keys it
sees. Plain integers.

A causal token's work is proportional to the keys it sees, so an even split by position is uneven work. Zigzag (Brandon et al.
2023, "Striped Attention"; Llama 3, section 3.3.2) cuts a document into 2 n pieces and gives rank r the r-th from either end:

    pieces of one document, n = 4     0 1 2 3 4 5 6 7       ranks     0 1 2 3 3 2 1 0

Long packed documents are each split in zigzag. Short ones stay whole on one rank, assigned so that work and tokens are
balanced; their keys and values are never sent. As few of the longest as possible are split, until work is within `GOOD_BALANCE`
of even: the tokens of the others, which see fewer keys, fill the remaining imbalance. Tokens per rank are equal, or differ by
one where the ranks do not divide the sequence. Not taken: zigzag over the packed sequence, whose work is as uneven as its
documents; per-document zigzag with padding (Transformer Engine), which computes the padding; and tile-sized pieces
(FlexAttention's balancer in torch), which split every document and so send all keys and values to all ranks.

Work counts the causal mask; sliding windows make tokens more equal than these orders assume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ultrascale.work.sharding.places import even_part

GOOD_BALANCE = 0.01
"""Excess of the busiest rank's work over the mean, as a fraction, at which no more documents are split: half of the promised 2
percent."""


class DocumentRange(NamedTuple):
    """Positions `start` to `stop` - 1 of a sequence, all in the document that begins at position `document`."""

    start: int
    stop: int
    document: int

    @property
    def work(self) -> int:
        """Number of pairs of these queries and the keys they see."""
        first, last = self.start - self.document, self.stop - self.document
        return (last * (last + 1) - first * (first + 1)) // 2


_NOTHING = (0, 0)
Pieces = tuple[DocumentRange, ...]
"""Pieces of one sequence that a rank holds, in order: the rank's slots."""


class VisiblePairs(NamedTuple):
    """Smallest rectangle around the visible pairs: slots of queries, and slots of keys."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    is_full: bool
    """True if every query in it sees every key in it."""

    @property
    def rows(self) -> int:
        """Number of queries."""
        return self.queries[1] - self.queries[0]

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key."""
        return self.rows * (self.keys[1] - self.keys[0])


@lru_cache(maxsize=4096)
def ring_order(length: int, ring: int, document_starts: tuple[int, ...] = (0,)) -> tuple[Pieces, ...]:
    """Pieces of each of `ring` ranks, for a sequence whose documents begin at `document_starts`, ascending from 0."""
    stops = (*document_starts[1:], length)
    documents = sorted((start - stop, start, stop) for start, stop in zip(document_starts, stops, strict=True))
    longest_first = [DocumentRange(start, stop, start) for _, start, stop in documents]
    best, least = None, float("inf")
    for num_split in _counts(len(documents)):
        assignment = _Assignment(length, ring)
        assignment.zigzag(longest_first[:num_split])
        assignment.deal_whole(longest_first[num_split:])
        assignment.even_out()
        imbalance = max(assignment.work) * ring / sum(assignment.work) - 1
        if imbalance < least:
            best, least = assignment, imbalance
        if least <= GOOD_BALANCE:
            break
    assert best is not None
    return best.in_slot_order()


def local_pieces(order: Sequence[Pieces], heads: int, rank: int) -> Pieces:
    """Pieces of rank `rank` of cp = len(order) * heads, before `heads` neighbours swap sequence shards for heads: its range of
    the slots at their common place in the ring."""
    pieces = order[rank // heads]
    first, length = even_part(num_slots(pieces), heads, rank % heads)
    halves = (
        DocumentRange(piece.start + max(0, first - slot), min(piece.stop, piece.start + first + length - slot), piece.document)
        for slot, piece in _with_slots(pieces)
    )
    return tuple(piece for piece in halves if piece.start < piece.stop)


def num_slots(pieces: Pieces) -> int:
    """Number of tokens in the pieces."""
    return sum(piece.stop - piece.start for piece in pieces)


def views(queries: Pieces, keys: Pieces, window: int | None) -> list[VisiblePairs]:
    """Views that each piece of `queries` has of `keys` under a causal mask and a sliding window; none for pieces that see
    nothing.

    Adjacent views that fully see the same keys are merged.
    """
    merged: list[VisiblePairs] = []
    documents: dict[int, list[tuple[int, DocumentRange]]] = {}
    for slot, piece in _with_slots(keys):
        documents.setdefault(piece.document, []).append((slot, piece))
    for first, piece in _with_slots(queries):
        document_keys = documents.get(piece.document, ())
        visible = [view for slot, other in document_keys if (view := _view(piece, first, other, slot, window))]
        if not visible:
            continue
        view = hull(visible)
        last = merged[-1] if merged else None
        if last and last.is_full and view.is_full and last.keys == view.keys and last.queries[1] == view.queries[0]:
            merged[-1] = VisiblePairs((last.queries[0], view.queries[1]), view.keys, True)
        else:
            merged.append(view)
    return merged


class RingTraffic(NamedTuple):
    """Communication of one place of a ring for one layer: (messages, slots of keys and values in them)."""

    keys: tuple[int, int]
    """Messages and slots for each pass of keys and values around the ring."""
    gradients: tuple[int, int]
    """Messages and slots of gradients on the way back to the ranks that own the keys."""


@lru_cache(maxsize=1024)
def ring_traffic(length: int, ring: int, place: int, window: int | None) -> RingTraffic:
    """Communication of `place` for a sequence of one document (`parallel.context.context_ring`): at each hop it sends on the
    keys that a later rank needs, and the gradients accumulated so far, until the last contributor returns them to the rank that
    owns the keys.
    """
    needs, keys, gradients = _needs(length, ring, window), [], []
    for distance in range(ring):
        source = needs[(place + distance) % ring]
        last = max(d for d in range(ring) if source[d] != _NOTHING)
        keys.append(_span_of_some(source[distance + 1 :]))
        if 1 <= distance <= last:
            gradients.append(_span_of_some(source[1 : distance + 1]))
    return RingTraffic(_messages(keys), _messages(gradients))


@lru_cache(maxsize=1024)
def gathered_traffic(length: int, ring: int, place: int, window: int | None) -> RingTraffic:
    """Communication of places of different lengths that gather by messages (`parallel.context.context_gather`): all keys to
    each other place, and to each the gradients of its keys that this one used."""
    needs, slots = _needs(length, ring, window), num_slots(ring_order(length, ring)[place])
    worked_on = [needs[(place + distance) % ring][distance] for distance in range(1, ring)]
    return RingTraffic((ring - 1, (ring - 1) * slots), _messages(worked_on))


@lru_cache(maxsize=1024)
def pairs_worked_on(length: int, ring: int, place: int, window: int | None) -> int:
    """Number of pairs of queries of `place` and keys that kernels compute, including those masked by causality or a window."""
    local, remote = _views_of_place(length, ring, place, window)
    slots = num_slots(ring_order(length, ring)[place])
    return (slots * slots if window is None else sum(view.pairs for view in local)) + sum(view.pairs for view in remote)


@lru_cache(maxsize=1024)
def rows_made(length: int, ring: int, place: int, window: int | None) -> int:
    """Result rows that `place` computes for its queries, hop by hop, before they are merged into one per query."""
    local, remote = _views_of_place(length, ring, place, window)
    slots = num_slots(ring_order(length, ring)[place])
    return (slots if window is None else sum(view.rows for view in local)) + sum(view.rows for view in remote)


def _views_of_place(length: int, ring: int, place: int, window: int | None) -> tuple[list[VisiblePairs], list[VisiblePairs]]:
    """Views that the queries of `place` have of its own keys, and of those of all other places."""
    order = ring_order(length, ring)
    local, *remote = (views(order[place], keys, window) for keys in (order[place], *order[:place], *order[place + 1 :]))
    return local, [view for of_keys in remote for view in of_keys]


class Masks(NamedTuple):
    """Masks of one window: elements, with padded rows, and peak temporary bytes of booleans while they are built, excluding the
    masks."""

    elements: int
    scratch_bytes: int


@lru_cache(maxsize=1024)
def windowed_masks(length: int, ring: int, place: int | None, window: int, row_multiple: int, itemsize: int) -> Masks:
    """Masks that `place` builds for a sequence of one document, one for each block of queries and keys that the sliding window
    cuts; `place` None: those of the place with most. Rows are padded to a multiple of `row_multiple` elements of `itemsize`
    bytes."""
    order = ring_order(length, ring)
    if place is None:
        return max(windowed_masks(length, ring, each, window, row_multiple, itemsize) for each in range(ring))
    num_elements = most = 0
    for distance in range(ring):
        for view in views(order[place], order[(place + distance) % ring], window):
            if not view.is_full:
                rows, keys = (stop - start for start, stop in (view.queries, view.keys))
                num_elements += rows * -(-keys // row_multiple) * row_multiple
                most = max(most, num_elements * itemsize + 2 * rows * keys)  # visible and masked booleans
    return Masks(num_elements, max(0, most - num_elements * itemsize))


@lru_cache(maxsize=64)
def _needs(length: int, ring: int, window: int | None) -> tuple[tuple[tuple[int, int], ...], ...]:
    """[source][d]: slots of keys of `source` that the place d before it uses."""
    order = ring_order(length, ring)
    return tuple(
        tuple(span([view.keys for view in views(order[source - distance], order[source], window)]) for distance in range(ring))
        for source in range(ring)
    )


def _messages(sent: Sequence[tuple[int, int]]) -> tuple[int, int]:
    lengths = [stop - start for start, stop in sent if stop > start]
    return len(lengths), sum(lengths)


def _span_of_some(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return span([bounds for bounds in ranges if bounds != _NOTHING])


def hull(parts: Sequence[VisiblePairs]) -> VisiblePairs:
    """Smallest rectangle around all of `parts`, which do not overlap."""
    around = VisiblePairs(span([p.queries for p in parts]), span([p.keys for p in parts]), False)
    return around._replace(is_full=around.pairs == sum(part.pairs for part in parts if part.is_full))


def span(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Range from the first start to the last stop; (0, 0) for none."""
    return min((r[0] for r in ranges), default=0), max((r[1] for r in ranges), default=0)


def _view(query: DocumentRange, query_slot: int, key: DocumentRange, key_slot: int, window: int | None) -> VisiblePairs | None:
    """View between two pieces of one document."""
    reach = query.stop if window is None else window  # no query sees further back than this
    first_query, last_key = max(query.start, key.start), min(key.stop, query.stop) - 1
    first_key, last_query = max(key.start, first_query - reach + 1), min(query.stop - 1, last_key + reach - 1)
    if first_query > last_query or first_key > last_key:
        return None
    is_full = last_key <= first_query and first_key > last_query - reach
    move_query, move_key = query_slot - query.start, key_slot - key.start
    return VisiblePairs(
        (first_query + move_query, last_query + 1 + move_query), (first_key + move_key, last_key + 1 + move_key), is_full
    )


def _with_slots(pieces: Pieces) -> Iterator[tuple[int, DocumentRange]]:
    slot = 0
    for piece in pieces:
        yield slot, piece
        slot += piece.stop - piece.start


def _counts(most: int) -> Iterator[int]:
    """0, 1, 2, 4, 8, ... and `most`."""
    yield 0
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


class _Assignment:
    """Slots assigned to each rank so far."""

    def __init__(self, length: int, ring: int):
        self.wanted = [even_part(length, ring, rank)[1] for rank in range(ring)]
        self.pieces: list[list[DocumentRange]] = [[] for _ in self.wanted]
        self.tokens, self.work = [0] * ring, [0] * ring

    def assign(self, rank: int, piece: DocumentRange) -> None:
        if piece.start < piece.stop:
            self.pieces[rank].append(piece)
            self.tokens[rank] += piece.stop - piece.start
            self.work[rank] += piece.work

    def zigzag(self, documents: Sequence[DocumentRange]) -> None:
        """Split each document in zigzag over all ranks."""
        ring = len(self.wanted)
        for document in documents:
            each, remainder = divmod(document.stop - document.start, ring)
            fewest_tokens = sorted(range(ring), key=lambda rank: (self.tokens[rank], self.work[rank]))[:remainder]
            # With an odd number of tokens the early piece has one more, and later places do slightly more work.
            most_work_first = sorted(range(ring), key=lambda rank: -self.work[rank])
            lengths = [each + (rank in fewest_tokens) for rank in most_work_first]
            early = [(rank, (length + 1) // 2) for rank, length in zip(most_work_first, lengths, strict=True)]
            late = [(rank, length // 2) for rank, length in zip(most_work_first, lengths, strict=True)]
            start = document.start
            for rank, size in (*early, *reversed(late)):
                self.assign(rank, DocumentRange(start, start + size, document.document))
                start += size

    def deal_whole(self, documents: Sequence[DocumentRange]) -> None:
        """Assign one whole document to each rank, round after round, the longest to the rank with the least work."""
        ring = len(self.wanted)
        for first in range(0, len(documents), ring):
            least_work_first = sorted(range(ring), key=lambda rank: self.work[rank])
            for rank, document in zip(least_work_first, documents[first : first + ring], strict=False):
                self.assign(rank, document)

    def even_out(self) -> None:
        """Equalise token counts: a rank with too many gives an end of a piece to one with too few, choosing the end that makes
        their work most equal."""
        while True:
            surplus = [have - want for have, want in zip(self.tokens, self.wanted, strict=True)]
            giver, taker = surplus.index(max(surplus)), surplus.index(min(surplus))
            if not surplus[giver]:
                return
            number, kept, moved = min(
                self._moves(giver, min(surplus[giver], -surplus[taker])), key=self._unevenness(giver, taker)
            )
            whole = self.pieces[giver].pop(number)
            self.tokens[giver] -= whole.stop - whole.start
            self.work[giver] -= whole.work
            self.assign(giver, kept)
            self.assign(taker, moved)

    def _moves(self, giver: int, most: int) -> Iterator[tuple[int, DocumentRange, DocumentRange]]:
        """(index of a piece, the part kept, the part given away), for either end of each piece."""
        longest = max(piece.stop - piece.start for piece in self.pieces[giver])
        for number, (start, stop, document) in enumerate(self.pieces[giver]):
            if stop - start >= min(most, longest):
                size = min(most, stop - start)
                yield number, DocumentRange(start + size, stop, document), DocumentRange(start, start + size, document)
                yield number, DocumentRange(start, stop - size, document), DocumentRange(stop - size, stop, document)

    def _unevenness(self, giver: int, taker: int) -> Callable[[tuple[int, DocumentRange, DocumentRange]], int]:
        difference = self.work[giver] - self.work[taker]
        return lambda gift: abs(difference - 2 * gift[2].work)

    def in_slot_order(self) -> tuple[Pieces, ...]:
        """Order slots: pieces of documents split over ranks come first, so that the keys that other ranks see are one slot
        range."""
        holders: dict[int, set[int]] = {}
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                holders.setdefault(piece.document, set()).add(rank)
        return tuple(tuple(sorted(ps, key=lambda p: (len(holders[p.document]) == 1, p.start))) for ps in self.pieces)
