"""A torch profiler's trace read back: what the host's threads did, what ran on the device, and who launched it.

The file is the Trace Event Format as `torch.profiler` exports it (Kineto): complete events with `cat` cpu_op, user_annotation,
cuda_runtime, kernel, gpu_memcpy, gpu_memset; `args.correlation` ties a kernel to the call that launched it, arrows of `cat`
fwdbwd tie a forward operation to its backward pass (sequence numbers, which are there too, begin anew on each thread), and
NCCL's kernels carry their process group's description. Times become seconds since the first step's start, which `origin` puts
on the clock that the ranks of a machine share: as seconds since the epoch they would be rounded to a quarter of a microsecond.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ultrascale.measure.step.spans import Range

MARK = "ultrascale: "
"""Our own ranges' names begin so."""
STEP = f"{MARK}step "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_WITHOUT_A_THREAD = ("gloo:", "nccl:")
"""Ranges of work that goes on beside a thread, which torch writes on the thread that started it: they do not nest."""


class Kernel(NamedTuple):
    """Something that ran on the device."""

    start: float
    end: float
    name: str
    stream: int
    launched: float
    """Time at which the host had launched it; its own start where the trace does not say."""
    thread: int | None
    """Thread that launched it."""
    group: str
    """NCCL's process group, in the words of `parallel.groups`; empty for others."""


@dataclass(frozen=True)
class RankEvents:
    """Events of one rank's trace."""

    main_thread: int
    ranges: dict[int, list[Range]]
    """Ranges by thread."""
    kernels: list[Kernel]
    """Kernels in order of their starts; none without a CUDA device."""
    steps: list[Range]
    """Steps as the main thread marked them."""
    origin: float = 0.0
    """Seconds since the epoch of the time 0 of all others."""


def read_trace(path: Path) -> RankEvents:
    """Read the trace in `path`, plain or gzipped. Raises ValueError if it holds no step of ours."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return events_of(json.loads(text))


def events_of(trace: Mapping[str, Any]) -> RankEvents:
    """Events of a trace that has been read."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    links = {(one["tid"], one["ts"]): one["id"] for one in trace["traceEvents"] if one.get("cat") == "fwdbwd"}
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)]
    if not marks:
        raise ValueError("the trace holds no step of ours: it was not made by `ultrascale measure step`")
    first = min(event["ts"] for event in marks)
    ranges: defaultdict[int, list[Range]] = defaultdict(list)
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
            ranges[event["tid"]].append(Range(start, end, name))
        elif category in ("cpu_op", "user_annotation") and not name.startswith(_WITHOUT_A_THREAD):
            link = links.get((event["tid"], event["ts"])) if category == "cpu_op" else None
            ranges[event["tid"]].append(Range(start, end, name, link))
    main_thread = marks[0]["tid"]
    return RankEvents(
        main_thread,
        dict(ranges),
        kernels=sorted(_kernel(start, end, event, launches) for start, end, event in on_device),
        steps=sorted(one for one in ranges[main_thread] if one.name.startswith(STEP)),
        origin=trace.get("baseTimeNanoseconds", 0) * 1e-9 + first * 1e-6,
    )


def _kernel(start: float, end: float, event: Mapping[str, Any], launches: Mapping[int, tuple[float, int]]) -> Kernel:
    arguments = event.get("args", {})
    launched, thread = launches.get(arguments.get("correlation", -1), (start, None))
    group = str(arguments.get("Process Group Description", ""))
    return Kernel(start, end, event["name"], int(arguments.get("stream", 0)), launched, thread, group)
