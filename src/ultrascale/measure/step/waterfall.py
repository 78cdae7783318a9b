"""Waterfall of a step's time on one rank: every moment belongs to one category, so that the parts sum to the step.

On CUDA categories come from the device's streams; the first of these that applies counts:

    computing     a kernel that is not NCCL's, by kind (`measure.step.categories`); overlapping communication is hidden
    an axis       an NCCL kernel without concurrent compute: exposed communication, with its waiting for late ranks
    all ranks, data wait   nothing runs, and the host is waiting for the other ranks, or for data
    launch gaps   nothing runs, because the host has not launched the next kernel yet
    idle          nothing runs, although the next kernel is launched: it is starting, or waits for an event

On a CPU the main thread runs the operations, while gloo's threads send: its innermost operation gives the category. Time in an
axis is starting messages and waiting for them; `launch gaps` is time of Python and autograd between operations. A wait for a
pipeline message is `pp`: bubble and message together, since the waiting rank cannot separate them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from typing import NamedTuple

from ultrascale.measure.step.categories import (
    AXES,
    CATEGORIES,
    COMPUTE,
    CORE,
    DATA,
    EVERYBODY,
    HOST,
    IDLE,
    PHASE,
    computing,
    kind_of_kernel,
)
from ultrascale.measure.step.spans import (
    Kernel,
    RankEvents,
    Segment,
    SpanPiece,
    ThreadTimeline,
    TimeSpan,
    clipped,
    innermost,
    partition,
    sums,
)


@dataclass(frozen=True)
class Waterfall:
    """Waterfall of one rank's steps, in seconds."""

    steps: tuple[dict[str, float], ...]
    """Seconds by category (`measure.step.categories.CATEGORIES`), for each step of the trace."""
    pieces: tuple[SpanPiece, ...]
    """All pieces, ascending and without gaps, for the trace and the picture."""
    communication: dict[str, float]
    """Seconds of each axis's NCCL kernels over all steps, overlapped or not; empty on a CPU, whose traces show no messages."""

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step."""
        return sum(map(sum, (step.values() for step in self.steps))) / len(self.steps)

    @property
    def mean(self) -> dict[str, float]:
        """Mean seconds of a step by category; they sum to `step_seconds`."""
        return {name: sum(step.get(name, 0.0) for step in self.steps) / len(self.steps) for name in CATEGORIES}


class TopRow(NamedTuple):
    """Total of one operation or kernel, by name, over all steps."""

    name: str
    category: str
    seconds: float
    """Self time in seconds, without operations inside it."""
    count: int


def waterfall(events: RankEvents) -> Waterfall:
    """Waterfall of the time between the first step's start and the last one's end."""
    host, windows = _Host(events), _windows(events.steps)
    busy, window = _busy(events.kernels, host), (events.steps[0].start, events.steps[-1].end)
    pieces = _on_device(busy, host, window) if busy else partition(window, [host.doing()], rest=HOST)
    steps = tuple(sums(clipped(pieces, step)) for step in windows)
    return Waterfall(steps, tuple(pieces), _communication(busy, window))


def top(events: RankEvents, *, count: int = 15) -> list[TopRow]:
    """The operations with the most self time: kernels on CUDA, operations of the main thread on a CPU."""
    durations: dict[tuple[str, str], list[float]] = {}
    for name, category, seconds in _named(events):
        durations.setdefault((name, category), []).append(seconds)
    rows = [TopRow(name, category, sum(samples), len(samples)) for (name, category), samples in durations.items()]
    return sorted(rows, key=lambda row: -row.seconds)[:count]


def _windows(steps: Sequence[TimeSpan]) -> list[tuple[float, float]]:
    """Start and end of every step; a step ends where the next starts, so that time between them counts."""
    ends = [*(step.start for step in steps[1:]), steps[-1].end]
    return [(step.start, end) for step, end in zip(steps, ends, strict=True)]


class _Host:
    """Timeline of the host."""

    def __init__(self, events: RankEvents):
        self.events = events
        # Phases cross other ranges, and are looked up by time; all others nest.
        self.timelines = {
            thread: ThreadTimeline(innermost([span for span in ranges if not span.name.startswith(PHASE)]))
            for thread, ranges in events.ranges.items()
        }
        phases = [span for span in events.ranges[events.main_thread] if span.name.startswith(PHASE)]
        self._phases = ThreadTimeline(innermost(phases))
        self.attention_links = frozenset(self._links_inside_core())

    def phase(self, when: float) -> str:
        """Name of the trainer's phase at `when`; empty outside of all phases."""
        stack = self._phases.at(when)
        return stack[-1].name if stack else ""

    def stack(self, thread: int | None, when: float) -> tuple[TimeSpan, ...]:
        """Ranges active on a thread at `when`, outermost first."""
        return self.timelines[thread].at(when) if thread in self.timelines else ()

    def doing(self) -> Iterator[SpanPiece]:
        """Categories of the main thread over time; gaps between its ranges are left out."""
        for segment in self.main_segments():
            yield SpanPiece(segment.start, segment.end, self.category(segment))

    def main_segments(self) -> Iterator[Segment]:
        """Segments of the main thread, split at the borders of phases."""
        borders = sorted({border for segment in self._phases.segments for border in (segment.start, segment.end)})
        for start, end, stack in self.timelines[self.events.main_thread].segments:
            inside = borders[bisect_right(borders, start) : bisect_left(borders, end)]
            yield from (Segment(*pair, stack) for pair in pairwise([start, *inside, end]))

    def category(self, segment: Segment) -> str:
        """Category of one of the main thread's segments."""
        middle = (segment.start + segment.end) / 2
        return computing(segment.stack, self.phase(middle), self.attention_links)

    def _links_inside_core(self) -> Iterator[int]:
        for timeline in self.timelines.values():
            for _, _, stack in timeline.segments:
                inside = dropwhile(lambda span: span.name != CORE, stack)
                yield from (span.link for span in inside if span.link is not None)


def _on_device(busy: Sequence[SpanPiece], host: _Host, window: tuple[float, float]) -> list[SpanPiece]:
    layers = [[piece for piece in busy if piece.category == name] for name in (*COMPUTE, *AXES, EVERYBODY)]
    empty = "nothing runs"
    pieces = partition(window, layers, rest=empty)
    waits = [piece for piece in host.doing() if piece.category in (DATA, EVERYBODY)]
    gaps = [piece for piece in pieces if piece.category == empty]
    return sorted([piece for piece in pieces if piece.category != empty] + list(_explained(gaps, host.events.kernels, waits)))


def _busy(kernels: Iterable[Kernel], host: _Host) -> list[SpanPiece]:
    return [
        SpanPiece(
            kernel.start,
            kernel.end,
            kind_of_kernel(
                kernel, host.stack(kernel.thread, kernel.launched), host.phase(kernel.launched), host.attention_links
            ),
        )
        for kernel in kernels
    ]


def _explained(gaps: Sequence[SpanPiece], kernels: Sequence[Kernel], waits: Sequence[SpanPiece]) -> Iterator[SpanPiece]:
    """Gaps of the device, categorised by the host's activity until it launched the kernel that ends each gap."""
    starts = [kernel.start for kernel in kernels]
    for gap in gaps:
        after = bisect_left(starts, gap.end - 1e-12)
        launched = gap.end if after == len(kernels) else min(max(kernels[after].launched, gap.start), gap.end)
        if launched > gap.start:
            yield from partition((gap.start, launched), [list(clipped(waits, (gap.start, launched)))], rest=HOST)
        if launched < gap.end:
            yield SpanPiece(launched, gap.end, IDLE)


def _communication(busy: Sequence[SpanPiece], window: tuple[float, float]) -> dict[str, float]:
    """Seconds in which at least one of an axis's NCCL kernels ran."""
    by_axis = {axis: [piece for piece in busy if piece.category == axis] for axis in (*AXES, EVERYBODY)}
    return {axis: sums(partition(window, [kernels], rest=""))[axis] for axis, kernels in by_axis.items() if kernels}


def _named(events: RankEvents) -> Iterator[tuple[str, str, float]]:
    """Name, category and self time of everything that ran."""
    host = _Host(events)
    if events.kernels:
        for kernel, piece in zip(events.kernels, _busy(events.kernels, host), strict=True):
            yield kernel.name, piece.category, piece.seconds
        return
    for segment in host.main_segments():
        yield segment.stack[-1].name, host.category(segment), segment.end - segment.start
