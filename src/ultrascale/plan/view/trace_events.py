"""A pipeline step for ui.perfetto.dev and chrome://tracing, in the Trace Event Format: one track per rank, one arrow per
message.

Format: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ultrascale.plan.pipeline.play import Timeline
from ultrascale.plan.view.draw_schedule import NAMES
from ultrascale.schedules.actions import Kind
from ultrascale.schedules.executable import dependencies_of

MICROSECONDS = 1e6
COLOURS = {Kind.FORWARD: "rail_response", Kind.BACKWARD: "good", Kind.INPUT_GRADIENT: "rail_idle", Kind.WEIGHT_GRADIENT: "bad"}
"""Colour names of chrome://tracing; Perfetto chooses its own by name."""


def trace_events(timeline: Timeline, *, title: str, after: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
    """JSON object to write to a file: names, passes, live activations as counters, messages as arrows. `after`: names and
    seconds of work on all ranks after the pipeline."""
    events = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for rank in range(len(timeline.schedule)):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += _passes(timeline, rank)
        events += _activation_counters(timeline, rank)
        events += _after(timeline, rank, after)
    events += _messages(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _passes(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    """Events of passes; the two passes of a pair are nested, since they have the same times."""
    for action, start, end in zip(timeline.schedule[rank], timeline.start[rank], timeline.end[rank], strict=True):
        for part in action.parts:
            yield {
                "ph": "X", "pid": 0, "tid": rank, "ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS,
                "name": f"{part.kind.value}{part.micro_batch}", "cat": NAMES[part.kind], "cname": COLOURS[part.kind],
                "args": {"stage": part.stage, "micro_batch": part.micro_batch},
            }  # fmt: skip


def _after(timeline: Timeline, rank: int, after: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    done = timeline.step_seconds
    for name, seconds in after.items():
        times = {"ts": done * MICROSECONDS, "dur": seconds * MICROSECONDS}
        yield {"ph": "X", "pid": 0, "tid": rank, **times, "name": name, "cat": "after the pipeline"}
        done += seconds


def _activation_counters(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    """Activations on the rank, in micro-batches of one stage, at each change."""
    changes = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 0), Kind.INPUT_GRADIENT: (-1, 1), Kind.WEIGHT_GRADIENT: (0, -1)}
    whole = waiting = 0
    for action, start, end in zip(timeline.schedule[rank], timeline.start[rank], timeline.end[rank], strict=True):
        for part in action.parts:
            more, late = changes[part.kind]
            whole, waiting = whole + more, waiting + late
            when = start if part.kind is Kind.FORWARD else end
            counts = {"whole": whole, "for weight gradients": waiting}
            yield {"ph": "C", "pid": 0, "name": f"activations, rank {rank}", "ts": when * MICROSECONDS, "args": counts}


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Flow events between ranks: from the end of the action that produces a result to the start of the action that waits for
    it."""
    dependencies = dependencies_of(timeline.schedule)
    places = [(rank, index) for rank, row in enumerate(timeline.schedule) for index in range(len(row))]
    message = 0
    for number, (rank, index) in enumerate(places):
        for source in {dependencies.sources[number], dependencies.other_sources[number]} - {len(places)}:
            sender, sent = places[source]
            if sender == rank:
                continue
            message += 1
            event = {"pid": 0, "cat": "message", "name": "message", "id": message}
            yield event | {"ph": "s", "tid": sender, "ts": timeline.end[sender][sent] * MICROSECONDS}
            yield event | {"ph": "f", "bp": "e", "tid": rank, "ts": timeline.start[rank][index] * MICROSECONDS}
