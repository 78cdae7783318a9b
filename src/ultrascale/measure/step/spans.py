"""Time intervals: splits nested ranges by the innermost one, and overlapping ones by priority.

    nested       step |--------------------------|        one thread's ranges, each inside another or beside it
                 op      |-------|   |----|
                 op        |--|
    innermost    step |--|op|op|op|--|op--|------|        every moment once, with the names around it

    layers       1st     |===|        |==|                a device's streams: the first layer that is busy counts
                 2nd  |------------|
    partition    2nd  |--|1st|-----|..|1st|....|          every moment of the window once; `rest` where nobody is busy

All times are seconds; the meaning of names is defined elsewhere (`measure.step.categories`).

Events are read from a torch profiler's trace: host threads, device kernels, and their launches. The file is in the Trace Event
Format as exported by `torch.profiler` (Kineto): complete events with `cat` cpu_op, user_annotation, cuda_runtime, kernel,
gpu_memcpy, gpu_memset; `args.correlation` links a kernel to the call that launched it, arrows of `cat` fwdbwd link a forward
operation to its backward pass (sequence numbers restart on each thread), and NCCL kernels carry their process group's
description. Times become seconds since the first step's start, and `origin` maps them to the clock that the ranks of a machine
share: as seconds since the epoch they would be rounded to a quarter of a microsecond.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


class TimeSpan(NamedTuple):
    """A range or operation that ran from `start` to `end`."""

    start: float
    end: float
    name: str
    link: int | None = None
    """Number that a forward operation and its backward pass share."""


class Segment(NamedTuple):
    """A time interval in which no range starts or ends."""

    start: float
    end: float
    stack: tuple[TimeSpan, ...]
    """Active ranges, outermost first."""


class SpanPiece(NamedTuple):
    """A time interval of one category."""

    start: float
    end: float
    category: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def innermost(ranges: Iterable[TimeSpan]) -> list[Segment]:
    """The nested `ranges` of one thread as ascending segments that do not overlap. Times without any range are left out.

    Clock reads and rounding can make a range extend beyond the one around it: if it lies mostly after that one, it is moved to
    start at its end, otherwise it is cut there.
    """
    leaf_segments: list[Segment] = []
    stack: list[TimeSpan] = []
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        while stack and stack[-1].end <= until:
            top = stack.pop()
            _add(leaf_segments, now, top.end, (*stack, top))
            now = max(now, top.end)
        if stack:
            _add(leaf_segments, now, until, tuple(stack))
        now = max(now, until)

    for span in sorted(ranges, key=lambda span: (span.start, -span.end)):
        advance(span.start)
        while stack and span.end - stack[-1].end > stack[-1].end - span.start:
            stack[-1] = stack[-1]._replace(end=span.start)
            advance(span.start)
        stack.append(span._replace(end=min(span.end, stack[-1].end)) if stack else span)
    advance(max((span.end for span in stack), default=0.0))
    return leaf_segments


def partition(window: tuple[float, float], layers: Sequence[Iterable[SpanPiece]], *, rest: str) -> list[SpanPiece]:
    """Partition of `window`, ascending: at each moment the first of `layers` that is busy, or `rest`. Merges equal neighbours.

    Within a layer, earlier pieces take precedence.
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
    pieces: list[SpanPiece] = []
    now = first
    for when, begins, key, category in events:
        _join(pieces, now, when, active[min(active)] if active else rest)
        now = when
        if begins:
            active[key] = category
        else:
            del active[key]
    _join(pieces, now, last, rest)
    return pieces


def sums(pieces: Iterable[SpanPiece]) -> dict[str, float]:
    """Seconds of each category."""
    total: defaultdict[str, float] = defaultdict(float)
    for piece in pieces:
        total[piece.category] += piece.seconds
    return dict(total)


def clipped(pieces: Iterable[SpanPiece], window: tuple[float, float]) -> Iterator[SpanPiece]:
    """The parts of `pieces` that lie in `window`."""
    first, last = window
    for piece in pieces:
        start, end = max(piece.start, first), min(piece.end, last)
        if start < end:
            yield SpanPiece(start, end, piece.category)


class ThreadTimeline:
    """Segments of a thread, for lookup by time."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = segments
        self._starts = [segment.start for segment in segments]

    def at(self, when: float) -> tuple[TimeSpan, ...]:
        """Ranges active at `when`, outermost first; empty if there are none."""
        index = bisect_right(self._starts, when) - 1
        if index < 0 or self.segments[index].end < when:
            return ()
        return self.segments[index].stack


def _add(segments: list[Segment], start: float, end: float, stack: tuple[TimeSpan, ...]) -> None:
    if end > start:
        segments.append(Segment(start, end, stack))


def _join(pieces: list[SpanPiece], start: float, end: float, category: str) -> None:
    if end <= start:
        return
    if pieces and pieces[-1].category == category and pieces[-1].end == start:
        pieces[-1] = SpanPiece(pieces[-1].start, end, category)
    else:
        pieces.append(SpanPiece(start, end, category))


MARK = "ultrascale: "
"""Prefix of the names of our ranges."""
STEP = f"{MARK}step "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WITHOUT_A_THREAD = ("gloo:", "nccl:")
"""Prefixes of asynchronous work, which torch records on the thread that started it: these ranges do not nest."""


class Kernel(NamedTuple):
    """A kernel or copy on the device."""

    start: float
    end: float
    name: str
    stream: int
    launched: float
    """Time at which the host launched it; its own start if the trace does not contain the launch."""
    thread: int | None
    """Thread that launched it."""
    group: str
    """Description of NCCL's process group, from `parallel.groups`; empty for other kernels."""


@dataclass(frozen=True)
class RankEvents:
    """Events of one rank's trace."""

    main_thread: int
    ranges: dict[int, list[TimeSpan]]
    """Ranges by thread."""
    kernels: list[Kernel]
    """Kernels by start time; empty without a CUDA device."""
    steps: list[TimeSpan]
    """Steps as the main thread marked them."""
    origin: float = 0.0
    """Time 0 of all other times, in seconds since the epoch."""


def read_trace(path: Path) -> RankEvents:
    """Read the trace in `path`, plain or gzipped. Raises ValueError if it holds no step of ours."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return events_of(json.loads(text))


def events_of(trace: Mapping[str, Any]) -> RankEvents:
    """Events of a trace that has been read."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    links = {(event["tid"], event["ts"]): event["id"] for event in trace["traceEvents"] if event.get("cat") == "fwdbwd"}
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)]
    if not marks:
        raise ValueError("the trace holds no step of ours: it was not made by `ultrascale measure step`")
    first = min(event["ts"] for event in marks)
    ranges: defaultdict[int, list[TimeSpan]] = defaultdict(list)
    launches: dict[int, tuple[float, int]] = {}
    on_device = []
    for event in events:
        category, arguments, name = event.get("cat"), event.get("args", {}), event["name"]
        start, end = (event["ts"] - first) * 1e-6, (event["ts"] + event.get("dur", 0) - first) * 1e-6
        if category in _ON_DEVICE:
            on_device.append((start, end, event))
        elif category in _LAUNCHES:
            if "correlation" in arguments:
                launches[arguments["correlation"]] = (end, event["tid"])
            ranges[event["tid"]].append(TimeSpan(start, end, name))
        elif category in ("cpu_op", "user_annotation") and not name.startswith(_WITHOUT_A_THREAD):
            link = links.get((event["tid"], event["ts"])) if category == "cpu_op" else None
            ranges[event["tid"]].append(TimeSpan(start, end, name, link))
    main_thread = marks[0]["tid"]
    return RankEvents(
        main_thread,
        dict(ranges),
        kernels=sorted(_kernel(start, end, event, launches) for start, end, event in on_device),
        steps=sorted(span for span in ranges[main_thread] if span.name.startswith(STEP)),
        origin=trace.get("baseTimeNanoseconds", 0) * 1e-9 + first * 1e-6,
    )


def _kernel(start: float, end: float, event: Mapping[str, Any], launches: Mapping[int, tuple[float, int]]) -> Kernel:
    arguments = event.get("args", {})
    launched, thread = launches.get(arguments.get("correlation", -1), (start, None))
    group = str(arguments.get("Process Group Description", ""))
    return Kernel(start, end, event["name"], int(arguments.get("stream", 0)), launched, thread, group)
