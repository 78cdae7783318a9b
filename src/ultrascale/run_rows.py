"""Rows of a run's `metrics.jsonl` and `events.jsonl`, as they are written, and as one of them is read.

`step` of a row is the number of steps done: 1 in the row of the first step, as the log and checkpoints count. Rows of earlier
releases have no `schema`. Their events count alike; their metrics counted steps from 0, and are read as if they were new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

METRICS, EVENTS = "ultrascale/metrics/1", "ultrascale/events/1"


def metric_line(step: int, values: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl: the values of a step, after which `step` steps are done."""
    return json.dumps({"schema": METRICS, "step": step, **values})


def event_line(event: Mapping[str, Any]) -> str:
    """A line of events.jsonl."""
    return json.dumps({"schema": EVENTS, **event})


def metric_row(value: object) -> dict[str, Any] | None:
    """The row that a line of metrics.jsonl holds, as parsed; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return value if "schema" in value else {"schema": METRICS, **value, "step": value["step"] + 1}
