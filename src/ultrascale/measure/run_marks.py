"""Events of a run by step, from its events.jsonl, for marking in pictures, since they may bend a curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.description.units import count_of
from ultrascale.launch.events import read_rows

WHAT = {"failure": "killed", "rewind": "rewound", "stop": "stopped"}
"""Words for events that a picture marks."""


@dataclass(frozen=True)
class RunMark:
    """One event of a run, after a number of steps."""

    step: int
    text: str


def marks_of(folder: Path) -> list[RunMark]:
    """Marks of the run in `folder`, in order; events at the same step are joined."""
    by_step: dict[int, list[str]] = {}
    for mark in _marks([row for row in read_rows(folder / "events.jsonl") if isinstance(row, dict)]):
        if mark.text not in by_step.setdefault(mark.step, []):
            by_step[mark.step].append(mark.text)
    return [RunMark(step, ", ".join(texts)) for step, texts in sorted(by_step.items())]


def _marks(rows: list[dict[str, Any]]) -> Iterator[RunMark]:
    before: Mapping[str, Any] = {}
    for row in rows:
        kind, step = row.get("event"), row.get("step")
        if not isinstance(step, int):
            continue
        if kind == "start":
            if step > 0:
                yield RunMark(step, _resumed(row, before))
            before = row
        elif kind in WHAT:
            yield RunMark(step, WHAT[kind])


def _resumed(row: Mapping[str, Any], previous: Mapping[str, Any]) -> str:
    """`resumed as tp2 (was dp2)`: the parts of the layout that changed; in rows of earlier releases the ranks, if those did."""
    layouts = [event["layout"] for event in (row, previous) if isinstance(event.get("layout"), list)]
    if len(layouts) == 2:
        now, was = ([str(part) for part in layout if part not in other] for layout, other in (layouts, layouts[::-1]))
        return f"resumed as {', '.join(now)} (was {', '.join(was)})" if now else "resumed"
    ranks, were = row.get("world"), previous.get("world")
    if isinstance(ranks, int) and were is not None and ranks != were:
        return f"resumed on {count_of(ranks, 'rank')} (was {were})"
    return "resumed"
