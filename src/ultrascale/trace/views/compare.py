"""Compares a trace with the plan of the same rank: memory, messages, FLOPs, row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ultrascale.plan.memory.ledger import CATEGORIES
from ultrascale.plan.memory.tally import Traffic, TrafficKey
from ultrascale.trace.groups import axis_of
from ultrascale.trace.planned import Planned
from ultrascale.trace.recording.record import RankTrace, Sent

NOT_COUNTED = ("receive", "barrier")
"""Kinds of messages that are not counted here: the sender counts them."""


class Row(NamedTuple):
    """One quantity, traced and planned; None: not planned."""

    name: str
    traced: int
    planned: int | None

    @property
    def percent(self) -> float | None:
        """Planned minus traced, in percent of traced."""
        if self.planned is None or not (self.traced or self.planned):
            return None
        return 100 * (self.planned / self.traced - 1) if self.traced else float("inf")


class TrafficRow(NamedTuple):
    """Messages of one kind along one axis."""

    axis: str
    key: TrafficKey
    traced: Traffic
    planned: Traffic | None


@dataclass(frozen=True)
class StepComparison:
    """All rows of one step."""

    memory: list[Row]
    """Rows by category, and the sum, each at its own peak."""
    traffic: list[TrafficRow]
    flops: list[Row]
    islands: list[Row] = field(default_factory=list)
    """Rows of the bytes that an outer step sends and keeps, if there are several islands."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return {
            "memory": _json(self.memory),
            "traffic": [
                {"axis": row.axis, **row.key._asdict(), "traced": row.traced._asdict(),
                 "planned": None if row.planned is None else row.planned._asdict()}
                for row in self.traffic
            ],
            "flops": _json(self.flops),
            "islands": _json(self.islands),
        }  # fmt: skip


def _json(rows: list[Row]) -> list[dict[str, Any]]:
    return [row._asdict() | {"percent": row.percent} for row in rows]


def compare(trace: RankTrace, planned: Planned | None, step: int = 1) -> StepComparison:
    """Compare a step of `trace` with the plan."""
    return StepComparison(
        _memory(trace, planned, step), _traffic(trace, planned, step), _flops(trace, planned, step), _islands(trace, planned)
    )


def traffic_of(trace: RankTrace, step: int) -> dict[TrafficKey, Traffic]:
    """Messages of a rank in a step, without host messages and numbers of rows."""
    counts: Counter[TrafficKey] = Counter()
    sizes: Counter[TrafficKey] = Counter()
    for sent in trace.sent:
        if sent.step != step or sent.is_host or sent.kind in NOT_COUNTED or sent.kind.endswith("of counts"):
            continue
        key = TrafficKey(sent.kind, sent.size, sent.stride)
        counts[key] += sent.times
        sizes[key] += leaving(trace, sent) * sent.times
    return {key: Traffic(counts[key], sizes[key]) for key in counts}


def leaving(trace: RankTrace, sent: Sent) -> int:
    """Bytes of a message as the planner counts them: along cp those that leave the rank, else the whole buffer."""
    layout = trace.layout
    along_cp = layout.cp > 1 and (sent.size, sent.stride) == layout.group("cp") and "context" in sent.line
    if along_cp and sent.kind in ("all_gather", "reduce_scatter"):
        return sent.num_bytes * (layout.cp - 1) // layout.cp
    return sent.num_bytes


def _memory(trace: RankTrace, planned: Planned | None, step: int) -> list[Row]:
    index = trace.peak_at(step)
    traced = trace.by_category(index)
    rows = [Row(name, traced[name], None if planned is None else planned.peak.by_category[name]) for name in CATEGORIES]
    rows = [row for row in rows if row.traced or row.planned]
    return [*rows, Row("peak", sum(traced.values()), None if planned is None else planned.peak.total)]


def _traffic(trace: RankTrace, planned: Planned | None, step: int) -> list[TrafficRow]:
    traced, expected = traffic_of(trace, step), {} if planned is None else planned.traffic
    rows = []
    for key in sorted({*traced, *expected}, key=lambda key: (key.stride, key.size, key.kind)):
        axis = axis_of(trace.layout, key.size, key.stride)
        rows.append(
            TrafficRow(axis, key, traced.get(key, Traffic(0, 0)), expected.get(key, None if planned is None else Traffic(0, 0)))
        )
    return rows


def _islands(trace: RankTrace, planned: Planned | None) -> list[Row]:
    if trace.outer is None:
        return []
    expected = (None, None) if planned is None or planned.outer is None else planned.outer
    return [Row(*values) for values in zip(("sent in a round", "kept on the host"), trace.outer, expected, strict=True)]


def _flops(trace: RankTrace, planned: Planned | None, step: int) -> list[Row]:
    attention = sum(n for (of_step, op, _), n in trace.flops.items() if of_step == step and "attention" in op)
    products = trace.total_flops(step) - attention
    if planned is None:
        return [Row("products", products, None), Row("attention", attention, None)]
    return [Row("products", products, planned.flops), Row("attention", attention, planned.attention_flops)]
