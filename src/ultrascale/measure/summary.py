"""Summary of a run in a few numbers, from its folder: metrics.jsonl, memory.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ultrascale.description.problems import mistake
from ultrascale.measure.plots import last_timed_start, read_memory, read_metrics


@dataclass(frozen=True)
class Summary:
    """Summary of one run. null (None): not in the folder."""

    steps: int
    tokens: int | None
    first_loss: float | None
    """Loss of the first row, in nats per token."""
    last_loss: float | None
    validation_loss: dict[str, float] = field(default_factory=dict)
    """Last value of each `val/loss...` metric."""
    tokens_per_second: float | None = None
    """Median over the rows after `timed_since`, as for MFU and HFU."""
    mfu: float | None = None
    hfu: float | None = None
    timed_since: int = 0
    """Number of steps done at the last start with timed steps; earlier ones may have had another layout or other machines."""
    planned_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    """Measured peak of rank 0 over the run's first steps, with the layout of that time."""
    noise_scale_tokens: float | None = None
    """Last estimate of the critical batch size, in tokens."""
    tokens_per_batch: int | None = None
    """Tokens per batch at the last step."""
    of_one_island: bool = False
    """True if speed and batch are those of one island of several."""

    @property
    def memory_percent(self) -> float | None:
        """(planned - measured) / measured, in percent."""
        if self.planned_peak_bytes is None or not self.measured_peak_bytes:
            return None
        return 100 * (self.planned_peak_bytes - self.measured_peak_bytes) / self.measured_peak_bytes


def logged_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of the run in `folder`, at least one. Raises SpecError if no step was logged there."""
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    if not rows:
        remedy = "Give the folder of a run that has trained, such as out/first."
        rule = "has no metrics.jsonl with a step in it" if folder.is_dir() else "there is no such folder"
        raise mistake(str(folder), rule, remedy)
    return rows


def summarise(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Summary of the run in `folder`, whose `logged_rows` are `rows`. Raises SpecError if its files cannot be read."""
    return summary_of(rows, read_memory(folder), last_timed_start(folder, rows))


def summary_of(rows: Sequence[Mapping[str, Any]], memory: Mapping[str, Any], timed_since: int) -> Summary:
    """Summary of rows of metrics.jsonl, at least one, and of memory.json."""
    timed = [row for row in rows if row["step"] > timed_since]
    losses = _values(rows, "train/loss")
    validation = sorted({key for row in rows for key in row if key.startswith("val/loss")})
    return Summary(
        steps=rows[-1]["step"],
        tokens=_last(rows, "progress/tokens"),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        validation_loss={key: _values(rows, key)[-1] for key in validation},
        tokens_per_second=_median(timed, "perf/tokens_per_s"),
        mfu=_median(timed, "perf/mfu"),
        hfu=_median(timed, "perf/hfu"),
        timed_since=timed_since,
        planned_peak_bytes=memory.get("planned_peak_bytes"),
        measured_peak_bytes=memory.get("measured_peak_bytes"),
        noise_scale_tokens=_last(rows, "train/noise_scale_tokens"),
        tokens_per_batch=_last(rows, "progress/tokens_per_batch"),
        of_one_island=max(_values(rows, "outer/islands"), default=1) > 1,
    )


def _values(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows if row.get(key) is not None]


def _last(rows: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next(reversed(_values(rows, key)), None)


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = _values(rows, key)
    return median(values) if values else None
