"""JSON of a run's folder: rows of `metrics.jsonl` and `events.jsonl`, and whole files. Each names the schema that it follows.

`step` of a row is the number of steps done: 1 in the row of the first step, as the log and checkpoints count. What an earlier
release wrote has no `schema`. Its events count alike; its metrics and the timelines of its `memory.json` counted steps from 0,
and are read as if they were new.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

METRICS, EVENTS = "ultrascale/metrics/1", "ultrascale/events/1"


def document(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `KIND.json` in a run's folder."""
    return {"schema": f"ultrascale/run-{kind}/1", **values}


def memory_document(value: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a memory.json, as parsed."""
    if "schema" in value:
        return dict(value)
    lifted = {
        key: [row | {"step": row["step"] + 1} for row in rows] for key, rows in value.items() if key.endswith("_timeline")
    }
    return document("memory", {**value, **lifted})


def metric_line(step: int, values: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl: the values of a step, after which `step` steps are done."""
    return json.dumps({"schema": METRICS, "step": step, **values})


def event_line(event: Mapping[str, Any]) -> str:
    """A line of events.jsonl."""
    return json.dumps({"schema": EVENTS, **event})


def is_validation_loss(key: str) -> bool:
    """True for `val/loss`, and for `val/loss/NAME` of one corpus of several."""
    return key == "val/loss" or key.startswith("val/loss/")


def metric_row(value: object) -> dict[str, Any] | None:
    """The row that a line of metrics.jsonl holds, as parsed; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return value if "schema" in value else {"schema": METRICS, **value, "step": value["step"] + 1}
