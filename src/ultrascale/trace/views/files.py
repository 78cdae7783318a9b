"""A trace as files: a picture of memory, a trace for Perfetto, a snapshot for torch's memory visualiser.

    .png .svg       bytes by category, stacked, over the steps                (`measure.plots.plot_memory`)
    .json           Trace Event Format, for ui.perfetto.dev: actions, messages, bytes by category as a counter
    .pickle         format of `torch.cuda.memory._snapshot()`, for pytorch.org/memory_viz; addresses from the model of
                    torch's allocator (`trace.allocator`)

Their time axis is the count of operations: a trace has no seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from pickle import dumps
from typing import Any

from ultrascale.description.problems import mistake
from ultrascale.measure.plots import plot_memory
from ultrascale.output_file import write_output
from ultrascale.trace.allocator import ROUND, SMALL_SEGMENT, placed
from ultrascale.trace.recording.record import RankTrace

MOST_POINTS = 3000
"""Largest number of points of a picture or counter: each interval keeps its peak."""


def write_file(trace: RankTrace, path: Path, *, planned_peak_bytes: int | None = None) -> Path:
    """Write `path` in the format of its suffix. Raises SpecError for other suffixes."""
    writers: dict[str, Callable[[], object]] = {
        ".png": lambda: _picture(trace, path, planned_peak_bytes),
        ".svg": lambda: _picture(trace, path, planned_peak_bytes),
        ".json": lambda: write_output(path, json.dumps(perfetto(trace))),
        ".pickle": lambda: write_output(path, dumps(snapshot(trace))),
    }
    if path.suffix not in writers:
        rule = f"ends in {path.suffix or 'nothing'}, and a trace is written as {', '.join(writers)}"
        raise mistake("--out", rule, "Such as --out memory.png.")
    writers[path.suffix]()
    return path


def points(trace: RankTrace) -> list[dict[str, Any]]:
    """Moments in order, each the peak of an interval of equal length: step, phase, bytes by category."""
    moments = list(trace.timeline())
    stride = -(-len(moments) // MOST_POINTS) or 1
    peaks = [
        max(moments[start : start + stride], key=lambda moment: sum(moment[1].values()))
        for start in range(0, len(moments), stride)
    ]
    marks, rows, index = trace.marks, [], 0
    for tick, by_category in peaks:
        while index + 1 < len(marks) and marks[index + 1].tick <= tick:
            index += 1
        rows.append({"tick": tick, "step": marks[index].step + 1, "phase": marks[index].phase, "bytes": by_category})
    return rows


def _picture(trace: RankTrace, path: Path, planned_peak_bytes: int | None) -> Path:
    title = f"Memory of rank {trace.rank} of {trace.layout.world_size} by category"
    return plot_memory(points(trace), path, planned_peak_bytes=planned_peak_bytes, title=title)


def perfetto(trace: RankTrace) -> dict[str, Any]:
    """The trace in the Trace Event Format."""
    return {"traceEvents": list(_events(trace)), "displayTimeUnit": "ms"}


def _events(trace: RankTrace) -> Iterator[dict[str, Any]]:
    title = f"{trace.model.name}, rank {trace.rank} of {trace.layout.world_size}"
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    for number, name in enumerate(("steps", "actions", "messages")):
        yield {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}
    for step in sorted({mark.step for mark in trace.marks}):
        start, end = trace.span(step)
        yield {"ph": "X", "pid": 0, "tid": 0, "name": f"step {step + 1}", "ts": start, "dur": end - start}
    for mark, following in pairwise([*trace.marks, None]):
        assert mark is not None
        end = trace.ticks if following is None else following.tick
        name, args = mark.action or mark.phase, {"phase": mark.phase, "step": mark.step + 1}
        yield {"ph": "X", "pid": 0, "tid": 1, "name": name, "ts": mark.tick, "dur": max(1, end - mark.tick), "args": args}
    for sent in trace.sent:
        args = {"bytes": sent.num_bytes, "ranks": sent.size, "stride": sent.stride, "line": sent.line, "during": sent.during}
        yield {"ph": "X", "pid": 0, "tid": 2, "name": f"{sent.kind} {sent.axis}", "ts": sent.tick, "dur": 1, "args": args}
    for point in points(trace):
        yield {"ph": "C", "pid": 0, "name": "live bytes", "ts": point["tick"], "args": point["bytes"]}


def snapshot(trace: RankTrace) -> dict[str, Any]:
    """Snapshot in the format of torch's memory visualiser."""
    allocator, changes = placed(trace)
    streams = {name: number for number, name in enumerate(dict.fromkeys(block.stream for block in trace.blocks))}
    living: dict[int, tuple[int, int]] = {}
    events = []
    for tick, number, address, size in changes:
        frames, stream = _frames(trace, number), streams[trace.blocks[number].stream]
        if size > 0:
            living[address] = (number, size)
        else:
            living.pop(address)
            events.append(_event("free_requested", tick, address, -size, stream, frames))
        events.append(_event("alloc" if size > 0 else "free_completed", tick, address, abs(size), stream, frames))
    return {"segments": _segments(trace, allocator.segments, living, streams), "device_traces": [events]}


def _event(action: str, tick: int, address: int, size: int, stream: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": tick, "frames": frames}


def _frames(trace: RankTrace, number: int) -> list[dict[str, Any]]:
    block = trace.blocks[number]
    file, _, line = block.line.rpartition(":")
    where = {"filename": f"ultrascale/{file}", "line": int(line or 0), "name": f"{block.what}: {block.category}"}
    return [where, {"filename": block.during or "before the first step", "line": 0, "name": block.stream}]


def _segments(
    trace: RankTrace, segments: list[tuple[int, int, str]], living: dict[int, tuple[int, int]], streams: dict[str, int]
) -> list[dict[str, Any]]:
    """Every segment with its blocks at the end."""
    records = []
    for address, size, stream in segments:
        inside = sorted((start, *living[start]) for start in living if address <= start < address + size)
        blocks, position = [], address
        for start, number, needed in inside:
            if start > position:
                blocks.append(_block(position, start - position, "inactive", []))
            size_of_block = -(-needed // ROUND) * ROUND
            blocks.append(_block(start, size_of_block, "active_allocated", _frames(trace, number)) | {"requested_size": needed})
            position = start + size_of_block
        if position < address + size:
            blocks.append(_block(position, address + size - position, "inactive", []))
        used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        records.append({
            "device": 0, "address": address, "total_size": size, "allocated_size": used, "active_size": used,
            "requested_size": sum(needed for _, _, needed in inside), "stream": streams.get(stream, 0),
            "segment_pool_id": (0, 0), "is_expandable": False,
            "segment_type": "small" if size == SMALL_SEGMENT else "large", "frames": [], "blocks": blocks,
        })  # fmt: skip
    return records


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
