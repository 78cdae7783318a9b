"""Compares plan and run: planned and measured bytes of each category at the peak, and their difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ultrascale.console import plain_table
from ultrascale.description.units import format_bytes
from ultrascale.measure.memory import LiveMemory
from ultrascale.plan.memory.ledger import CATEGORIES
from ultrascale.plan.memory.replay import MemoryPlan

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class CategoryDifference:
    """One category, or the sum."""

    name: str
    planned_bytes: int
    measured_bytes: int | None
    """Measured bytes; None where the device reports only the sum."""
    percent: float | None
    """(planned - measured) in percent *of the measured sum*, so that small categories get small numbers."""


def compare_memory(
    plan: MemoryPlan, measured: Mapping[str, int], *, measured_total: int | None = None
) -> list[CategoryDifference]:
    """Planned and measured bytes at the peak, by category; the last entry, `peak`, is the sum.

    `measured` are bytes by category (`LiveMemory.peak.by_category`); categories that are not in it were not measured.
    """
    total = sum(measured.values()) if measured_total is None else measured_total
    rows = [_difference(name, plan.by_category[name], measured.get(name), total) for name in CATEGORIES]
    return [
        *(row for row in rows if row.planned_bytes or row.measured_bytes),
        _difference("peak", plan.peak.total, total, total),
    ]


def compare_run(plan: MemoryPlan, memory: LiveMemory) -> dict[str, Any]:
    """Record of a run's memory as a JSON-able dictionary: the comparison, and the peaks of both timelines."""
    rows = compare_memory(plan, memory.peak.by_category)
    return {
        "difference_percent": rows[-1].percent,
        "planned_peak_bytes": plan.peak.total,
        "planned_peak_phase": plan.peak.phase,
        "measured_peak_bytes": memory.peak.total,
        "measured_peak_phase": memory.peak.phase,
        "by_category": [asdict(row) for row in rows],
    }


def comparison_table(rows: list[CategoryDifference]) -> Table:
    """`rows` for a terminal."""
    columns = ("memory at the peak", "planned", "measured", "difference")
    table = plain_table(*columns, left=columns[:1], whole=columns, pad_edge=True, padding=(0, 2, 0, 0))
    for row in rows:
        measured = "" if row.measured_bytes is None else format_bytes(row.measured_bytes)
        difference = "" if row.percent is None else f"{round(row.percent, 1) + 0.0:.1f}%"
        style = "bold" if row.name == "peak" else ""
        table.add_row(row.name, format_bytes(row.planned_bytes), measured, difference, style=style)
    return table


def _difference(name: str, planned: int, measured: int | None, total: int) -> CategoryDifference:
    percent = None if measured is None or total == 0 else 100 * (planned - measured) / total
    return CategoryDifference(name, planned, measured, percent)
