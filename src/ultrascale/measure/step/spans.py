"""Stretches of time: nested ones cut into what is innermost when, overlapping ones into what counts when.

    nested       step |--------------------------|        one thread's ranges, each inside another or beside it
                 op      |-------|   |----|
                 op        |--|
    innermost    step |--|op|op|op|--|op--|------|        every moment once, with the names around it

    layers       1st     |===|        |==|                a device's streams: the first layer that is busy counts
                 2nd  |------------|
    partition    2nd  |--|1st|-----|..|1st|....|          every moment of the window once; `rest` where nobody is busy

Seconds everywhere. Nothing here knows what a name means.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Something that ran from `start` to `end`."""

    start: float
    end: float
    name: str
    link: int | None = None
    """Number that a forward operation and its backward pass share."""


class Segment(NamedTuple):
    """A stretch in which nothing begins or ends."""

    start: float
    end: float
    stack: tuple[Range, ...]
    """Ranges under way, outermost first."""


class Piece(NamedTuple):
    """A stretch of one category."""

    start: float
    end: float
    category: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def innermost(ranges: Iterable[Range]) -> list[Segment]:
    """The nested `ranges` of one thread as stretches that do not overlap, ascending. Times without any range are left out.

    Clocks that are read one after the other, and rounding, make ranges stick out of those around them: one that lies mostly
    behind another is taken to begin where that one ends, any other is cut at its end.
    """
    found: list[Segment] = []
    stack: list[Range] = []
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        while stack and stack[-1].end <= until:
            top = stack.pop()
            _add(found, now, top.end, (*stack, top))
            now = max(now, top.end)
        if stack:
            _add(found, now, until, tuple(stack))
        now = max(now, until)

    for one in sorted(ranges, key=lambda one: (one.start, -one.end)):
        advance(one.start)
        while stack and one.end - stack[-1].end > stack[-1].end - one.start:
            stack[-1] = stack[-1]._replace(end=one.start)
            advance(one.start)
        stack.append(one._replace(end=min(one.end, stack[-1].end)) if stack else one)
    advance(max((one.end for one in stack), default=0.0))
    return found


def partition(window: tuple[float, float], layers: Sequence[Iterable[Piece]], *, rest: str) -> list[Piece]:
    """Every moment of `window` once, ascending: the first of `layers` that is busy, or `rest`. Equal neighbours are one.

    Within a layer the piece that comes first in it wins.
    """
    first, last = window
    events: list[tuple[float, int, tuple[int, int], str]] = []
    for depth, layer in enumerate(layers):
        for number, piece in enumerate(layer):
            start, end = max(piece.start, first), min(piece.end, last)
            if start < end:
                events += [(start, 1, (depth, number), piece.category), (end, 0, (depth, number), piece.category)]
    events.sort(key=lambda event: event[:3])
    active: dict[tuple[int, int], str] = {}
    made: list[Piece] = []
    now = first
    for when, begins, key, category in events:
        _join(made, now, when, active[min(active)] if active else rest)
        now = when
        if begins:
            active[key] = category
        else:
            del active[key]
    _join(made, now, last, rest)
    return made


def sums(pieces: Iterable[Piece]) -> dict[str, float]:
    """Seconds of each category."""
    total: defaultdict[str, float] = defaultdict(float)
    for piece in pieces:
        total[piece.category] += piece.seconds
    return dict(total)


def clipped(pieces: Iterable[Piece], window: tuple[float, float]) -> Iterator[Piece]:
    """The parts of `pieces` that lie in `window`."""
    first, last = window
    for piece in pieces:
        start, end = max(piece.start, first), min(piece.end, last)
        if start < end:
            yield Piece(start, end, piece.category)


class Timeline:
    """Segments of a thread to look up by time."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = segments
        self._starts = [segment.start for segment in segments]

    def at(self, when: float) -> tuple[Range, ...]:
        """Ranges under way at `when`, outermost first; empty if there are none."""
        index = bisect_right(self._starts, when) - 1
        if index < 0 or self.segments[index].end < when:
            return ()
        return self.segments[index].stack


def _add(found: list[Segment], start: float, end: float, stack: tuple[Range, ...]) -> None:
    if end > start:
        found.append(Segment(start, end, stack))


def _join(made: list[Piece], start: float, end: float, category: str) -> None:
    if end <= start:
        return
    if made and made[-1].category == category and made[-1].end == start:
        made[-1] = Piece(made[-1].start, end, category)
    else:
        made.append(Piece(start, end, category))
