"""Report of profiled steps: planned and measured seconds by category; a table, a small trace of all ranks, a picture."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.console import plain_table
from ultrascale.measure.step.categories import ATTENTION, CATEGORIES, COMPUTE, EVERYBODY, HOST, PRODUCTS
from ultrascale.measure.step.spans import SpanPiece
from ultrascale.measure.step.waterfall import TopRow, Waterfall

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {
    "dp": "dp, exposed", "tp": "tp, exposed", "cp": "cp, exposed", "ep": "ep, exposed", "pp": "pp, exposed, and bubble",
    EVERYBODY: "wait for slowest rank",
}  # fmt: skip
COLOURS = {
    PRODUCTS: "#3b6fb6", ATTENTION: "#7fb2d9", "element-wise": "#4f9d69", "recomputation": "#a5d0a8", "optimizer": "#8b5fa8",
    "dp": "#d1603d", "tp": "#e0843c", "cp": "#e0a83c", "pp": "#c9b458", "ep": "#b5483a", EVERYBODY: "#8c3b2e",
    "data wait": "#22272e", HOST: "#a9b0b8", "idle": "#e3e6ea",
}  # fmt: skip
NAME_WIDTH = 42
"""Columns of the longest name of a kernel: the table fits a terminal of 80."""
BARS = 24
"""Columns of the longest bar."""


@dataclass(frozen=True)
class RankSteps:
    """Results of one rank; JSON-able."""

    rank: int
    step_seconds: list[float]
    mean: dict[str, float]
    """Seconds of a step by category."""
    communication: dict[str, float]
    """Seconds of a step that NCCL's kernels of an axis took, hidden or not."""
    top: list[TopRow]
    """Longest operations, with seconds and counts over all profiled steps."""

    @classmethod
    def of(cls, rank: int, waterfall: Waterfall, top: list[TopRow]) -> RankSteps:
        """The report of `rank`."""
        sent = {axis: seconds / len(waterfall.steps) for axis, seconds in waterfall.communication.items()}
        return cls(rank, [sum(step.values()) for step in waterfall.steps], waterfall.mean, sent, top)


@dataclass(frozen=True)
class StepReport:
    """Measured steps of all ranks, and the plan."""

    steps: list[int]
    """Profiled steps, counted from 1."""
    ranks: list[RankSteps]
    planned: dict[str, float]
    """Seconds by category, those that are priced."""
    planned_origin: str
    """Basis of the plan."""
    unprofiled_step_seconds: float
    """The median of as many steps without the profiler, on the first rank."""
    facts: dict[str, Any]
    """Machine, versions, run."""

    @property
    def step_seconds(self) -> float:
        """Mean over steps and ranks."""
        return sum(sum(rank.mean.values()) for rank in self.ranks) / len(self.ranks)

    def measured(self, category: str) -> float:
        """Mean seconds of a category over ranks."""
        return sum(rank.mean[category] for rank in self.ranks) / len(self.ranks)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> StepReport:
        """The report from the dictionary that `to_json` returned."""
        ranks = [RankSteps(**rank | {"top": [TopRow(*row) for row in rank["top"]]}) for rank in facts["ranks"]]
        values: dict[str, Any] = {field.name: facts[field.name] for field in fields(cls)}
        values["ranks"] = ranks
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary; seconds."""
        return asdict(self) | {"step_seconds": self.step_seconds, "by_category": {n: self.measured(n) for n in CATEGORIES}}


def waterfall_table(report: StepReport) -> Table:
    """Table of planned and measured seconds by category; two to eight ranks get a column each, otherwise bars are drawn."""
    several = report.ranks if 1 < len(report.ranks) <= 8 else []
    by_ranks = [f"rank {rank.rank}" for rank in several] or [""]
    columns = ("ms of a step", "planned", "measured", "difference", *by_ranks)
    table = plain_table(*columns, left=(columns[0], ""), whole=columns, pad_edge=True, padding=(0, 2, 0, 0))
    longest = max(map(report.measured, CATEGORIES))
    for name in CATEGORIES:
        planned, measured = report.planned.get(name), report.measured(name)
        by_rank = [rank.mean[name] for rank in several]
        if not planned and not any((measured, *by_rank)):
            continue
        bar = "█" * round(BARS * measured / longest)
        table.add_row(WORDS.get(name, name), *_numbers(planned, measured), *(map(_milliseconds, by_rank) if several else [bar]))
    total = sum(report.planned.values()) if set(report.planned) >= set(CATEGORIES) - {"idle"} else None
    by_rank = [sum(rank.mean.values()) for rank in several]
    table.add_row("step", *_numbers(total, report.step_seconds), *map(_milliseconds, by_rank), style="bold")
    return table


def top_table(rows: Sequence[TopRow], num_steps: int) -> Table:
    """Table of the operations or kernels with the most self time on one rank, per step."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("operation or kernel", max_width=NAME_WIDTH, no_wrap=True)
    table.add_column("is", no_wrap=True)
    for column in ("ms/step", "times"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        times = row.count / num_steps
        table.add_row(row.name, row.category, f"{row.seconds / num_steps * 1e3:.2f}", f"{times:,.0f}")
    return table


def write_merged(path: Path, by_rank: Mapping[int, Sequence[SpanPiece]], *, title: str) -> None:
    """Write a gzipped trace of all ranks' categories, one track per rank, for ui.perfetto.dev."""
    origin = min(pieces[0].start for pieces in by_rank.values())
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for rank, pieces in by_rank.items():
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events += (
            {
                "ph": "X", "pid": 0, "tid": rank, "ts": (piece.start - origin) * 1e6, "dur": piece.seconds * 1e6,
                "name": WORDS.get(piece.category, piece.category),
            }
            for piece in pieces
        )  # fmt: skip
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def plot_steps(report: StepReport, path: Path) -> Path:
    """Draw a stacked bar for the plan and one for each rank, by category, on one scale.

    Raises ModuleNotFoundError without matplotlib (extra `plot`).
    """
    from ultrascale.measure.plots import new_figure, save_figure

    figure, axes = new_figure("Where the time of a step goes", "milliseconds", "")
    bars = [("planned", report.planned)] if report.planned else []
    bars += [(f"rank {rank.rank}", rank.mean) for rank in report.ranks]
    shown = [name for name in CATEGORIES if any(bar.get(name) for _, bar in bars)]
    for row, (_, bar) in enumerate(bars):
        left = 0.0
        for name in shown:
            width = bar.get(name, 0.0) * 1e3
            axes.barh(row, width, left=left, color=COLOURS[name], height=0.72, label=WORDS.get(name, name) if not row else None)
            left += width
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return save_figure(figure, path)


def hidden_lines(report: StepReport) -> list[str]:
    """Lines with the overlapped fraction of each axis's communication, if the device reports it."""
    lines = []
    for axis in dict.fromkeys(axis for rank in report.ranks for axis in rank.communication):
        sent = sum(rank.communication.get(axis, 0.0) for rank in report.ranks) / len(report.ranks)
        hidden = 1 - report.measured(axis) / sent if sent else 0.0
        lines.append(f"{axis}: {sent * 1e3:.2f} ms of messages a step, {max(0.0, hidden):.0%} of it behind computing")
    return lines


def computing_share(report: StepReport) -> float:
    """Fraction of the measured step spent in compute, including the optimizer."""
    return sum(map(report.measured, COMPUTE)) / report.step_seconds


def _numbers(planned: float | None, measured: float) -> tuple[str, str, str]:
    if planned is None:
        return "", _milliseconds(measured), ""
    return _milliseconds(planned), _milliseconds(measured), f"{(measured - planned) * 1e3:+.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
