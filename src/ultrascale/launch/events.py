"""Rows of a run's `events.jsonl`: their time stamps, and tolerant reading of a file that may be damaged.

A wall clock may be set back or forward. The machine's monotonic clock may not, but restarts at each boot: two times are
compared by the monotonic clock if both were taken since the same boot, and by the wall clock otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

NEEDED = {
    "start": ("step",),
    "stepped": ("step",),
    "stop": ("step",),
    "end": ("step",),
    "rewind": ("step", "to"),
    "failure": (),
}
"""Kinds of events that the account of restarts reads, and the step fields each must have. Others are for people."""
MOST_STEPS, MOST_SECONDS = 2**53, 1e12
"""Upper bounds of numbers: steps, and seconds (some 30,000 years)."""


@dataclass(frozen=True)
class Event:
    """A valid row."""

    kind: str
    time: float
    """Seconds of the wall clock."""
    monotonic: float | None = None
    """Seconds of the monotonic clock since boot."""
    boot: str = ""
    """Identifier of the machine's boot; empty if not known."""
    step: int | None = None
    to: int | None = None
    """For a rewind: the step it went back to."""
    cause: str = ""
    rank: int | None = None
    node: str = ""
    again: bool = True
    """For a failure: True if the launcher restarted the ranks."""


def stamp() -> dict[str, Any]:
    """Current time, as fields of a row."""
    return {"time": time.time(), "monotonic": time.monotonic(), "boot": _boot()}


def seconds_between(earlier: Event, later: Event) -> float | None:
    """Seconds between two events; None if unknown, because the clock was set back in between."""
    if earlier.boot and earlier.boot == later.boot and earlier.monotonic is not None and later.monotonic is not None:
        seconds = later.monotonic - earlier.monotonic
    else:
        seconds = later.time - earlier.time
    return seconds if seconds >= 0 else None


def read_rows(path: Path) -> Iterable[object]:
    """The file's lines as JSON; None for each invalid line, such as one truncated by a crash. No lines if there is no file."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


def longest_seconds(metrics: Path, key: str) -> float:
    """Largest value of `key`, such as `perf/save_s`, in rows of a run's metrics; 0 if there is none."""
    values = [row.get(key) for row in read_rows(metrics) if isinstance(row, dict)]
    return max((float(value) for value in values if isinstance(value, int | float) and _is_seconds(value)), default=0.0)


def is_event(row: object) -> bool:
    """True if this is a row of any kind, including kinds that are not read here."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("event"), str)
        and (row["event"] not in NEEDED or event_of(row) is not None)
    )


def event_of(row: object) -> Event | None:
    """The event of a row; None if it is of another kind, or lacks a field of its kind."""
    if not isinstance(row, dict) or not isinstance(row.get("event"), str) or row["event"] not in NEEDED:
        return None
    kind, when, monotonic = row["event"], row.get("time"), row.get("monotonic")
    cause, node, boot = (row.get(key, "") for key in ("cause", "node", "boot"))
    numbers = [row.get(key) for key in ("step", "to", "rank")]
    good = (
        _is_seconds(when)
        and (monotonic is None or _is_seconds(monotonic))
        and all(isinstance(text, str) for text in (cause, node, boot))
        and all(number is None or (type(number) is int and 0 <= number <= MOST_STEPS) for number in numbers)
        and all(row.get(key) is not None for key in NEEDED[kind])
    )
    if when is None or not good:
        return None
    step, to, rank = numbers
    return Event(kind, float(when), monotonic, boot, step, to, cause, rank, node, row.get("again") is not False)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_SECONDS and isfinite(value)


@cache
def _boot() -> str:
    """Eight digits of Linux's random boot id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""
