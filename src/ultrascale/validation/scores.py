"""Scores of predictions: errors, rankings and verdicts, compared with measured values exactly as reported.

    time      rows whose source printed a step time or tokens per second; tiers A and B, tier C separately
    rate      rows that print only TFLOP/s or an MFU: FLOPs per second by their own convention
    memory    by instrument: allocator peaks against allocated bytes, everything else against reserved bytes
    picks     within a cell (source, model, GPUs, batch): Kendall's tau of the order, and the regret of the fastest predicted
    verdicts  fits or not, against runs that ran and runs reported as out of memory

An error is (predicted - measured) / measured. Only this file reads `RunResult`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from ultrascale.validation.cells.stated import SCAN, source_of
from ultrascale.validation.predict import RowPrediction
from ultrascale.validation.rows import MEASURED, MeasuredRow

SMALLEST_CELL = 3
"""Runs of a cell below which an order is meaningless."""
ALLOCATOR_PEAKS = ("max_allocated",)


@dataclass(frozen=True)
class ScoredRow:
    """A row with its prediction."""

    row: MeasuredRow
    predicted: RowPrediction

    @property
    def source(self) -> str:
        return source_of(self.row.config)

    @property
    def counts(self) -> bool:
        """True if the row counts in the main tables: tier C is noisy or incomplete."""
        return self.row.measured.tier.upper() != "C"

    @property
    def step_seconds(self) -> float | None:
        """Measured step time, if the source printed it or tokens per second."""
        measured, config = self.row.measured, self.row.config
        if not _reports(self.row, "step_time", "tokens_per_s"):
            return None
        if measured.step_time_s:
            return measured.step_time_s
        if not measured.tokens_per_s_per_gpu or not self.predicted.tokens_per_second_per_gpu:
            return None
        assert self.predicted.step_seconds is not None, config
        return self.predicted.step_seconds * self.predicted.tokens_per_second_per_gpu / measured.tokens_per_s_per_gpu


@dataclass(frozen=True)
class Errors:
    """Relative errors of a group of rows."""

    group: str
    count: int
    median_absolute: float
    mean_absolute: float
    bias: float
    """Mean signed error."""
    median_error: float
    """Median signed error."""
    p90_absolute: float
    covered: float | None = None
    """Fraction inside the prediction interval, if there is one."""


@dataclass(frozen=True)
class Picks:
    """Rankings within the cells of a source."""

    group: str
    cells: int
    rows: int
    median_tau: float
    median_regret: float
    """Median regret of the layout predicted to be fastest: its measured time over the best measured time, minus one."""
    mean_regret: float
    p90_regret: float


@dataclass(frozen=True)
class Verdicts:
    """Verdicts on whether runs fit, predicted and actual."""

    group: str
    ran_and_fits: int
    ran_but_called_too_large: int
    failed_and_called_too_large: int
    failed_but_fits: int

    @property
    def recall(self) -> float | None:
        """Fraction of the failed runs that were predicted not to fit."""
        failed = self.failed_and_called_too_large + self.failed_but_fits
        return self.failed_and_called_too_large / failed if failed else None

    @property
    def false_alarms(self) -> float | None:
        """Fraction of the successful runs that were predicted not to fit."""
        ran = self.ran_and_fits + self.ran_but_called_too_large
        return self.ran_but_called_too_large / ran if ran else None


@dataclass(frozen=True)
class ValidationReport:
    """Everything `ultrascale validate` prints."""

    rows: int
    time: dict[str, list[Errors]]
    """Errors by grouping: all, source, accelerator, kind, tier C."""
    rate: list[Errors]
    memory: list[Errors]
    picks: list[Picks]
    verdicts: list[Verdicts]
    unrepresentable: list[tuple[str, str]]
    """Identities of rows without a prediction, with the reason."""


def score(rows: Sequence[MeasuredRow], predictions: Sequence[RowPrediction]) -> ValidationReport:
    """Compare predictions with the measurements of their rows."""
    cases = [ScoredRow(row, prediction) for row, prediction in zip(rows, predictions, strict=True)]
    timed = [case for case in cases if case.step_seconds and case.predicted.step_seconds]
    main, uncounted = [c for c in timed if c.counts], [c for c in timed if not c.counts]
    weighed = [c for c in cases if _memory_error(c) is not None]
    return ValidationReport(
        rows=len(cases),
        time={
            "all": _group(main, lambda _: "all rows", _time_error) + _per_source_mean(main),
            "source": _group(main, lambda c: c.source, _time_error),
            "accelerator": _group(main, lambda c: c.row.config.gpu_family or c.row.config.gpu, _time_error),
            "kind": _group(main, lambda c: c.predicted.kind, _time_error),
            "tier C": _group(uncounted, lambda c: c.source, _time_error),
        },
        rate=_group([c for c in cases if _rate_error(c) is not None], _tiered, _rate_error),
        memory=_group(weighed, lambda c: f"{_instrument(c.row)}: {c.source}", _memory_error)
        + _group(weighed, lambda c: f"{_instrument(c.row)}: all", _memory_error),
        picks=_picks(timed),
        verdicts=_verdicts(cases),
        unrepresentable=[(case.row.identity, case.predicted.reason) for case in cases if case.predicted.step_seconds is None],
    )  # fmt: skip


def summarise(group: str, errors: Iterable[float], covered: Sequence[bool] = ()) -> Errors:
    """Summary of at least one relative error."""
    signed = np.array(list(errors))
    absolute = np.abs(signed)
    return Errors(
        group, len(signed), float(np.median(absolute)), float(absolute.mean()), float(signed.mean()), float(np.median(signed)),
        float(np.quantile(absolute, 0.9)), fmean(covered) if covered else None,
    )  # fmt: skip


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b of two columns: 1 for the same order, -1 for the reverse; 0 if one of them is constant."""
    a, b = (np.sign(np.subtract.outer(column, column))[np.triu_indices(len(column), 1)] for column in (left, right))
    scale = np.sqrt(float((a != 0).sum()) * float((b != 0).sum()))
    return float((a * b).sum() / scale) if scale else 0.0


def _reports(row: MeasuredRow, *quantities: str) -> bool:
    """True if the source printed one of these quantities, or if the row does not state which."""
    reported = row.measured.reported
    return not reported or any(quantity in reported for quantity in quantities)


def _time_error(case: ScoredRow) -> float:
    assert case.step_seconds and case.predicted.step_seconds
    return case.predicted.step_seconds / case.step_seconds - 1


def _rate_error(case: ScoredRow) -> float | None:
    """Error of FLOPs per second, for rows that print no time."""
    row, predicted = case.row.measured, case.predicted.flops_per_second_per_gpu
    has_time = bool(row.reported or row.step_time_s or row.tokens_per_s_per_gpu)
    if predicted is None or (has_time and _reports(case.row, "step_time", "tokens_per_s")):
        return None
    if row.tflops_per_gpu and _reports(case.row, "tflops"):
        return predicted / (row.tflops_per_gpu * 1e12) - 1
    if row.mfu_reported and case.predicted.mfu:
        peak = row.mfu_peak_tflops * 1e12 if row.mfu_peak_tflops else predicted / case.predicted.mfu
        return predicted / (row.mfu_reported * peak) - 1
    return None


def _memory_error(case: ScoredRow) -> float | None:
    measured = case.row.measured.peak_mem_gib
    if not measured or not _reports(case.row, "mem") or case.predicted.allocated_bytes is None:
        return None
    allocator = _instrument(case.row) in ALLOCATOR_PEAKS
    predicted = case.predicted.allocated_bytes if allocator else case.predicted.reserved_bytes
    assert predicted is not None
    return predicted / 2**30 / measured - 1


def _instrument(row: MeasuredRow) -> str:
    return row.measured.mem_kind or "unknown"


def _tiered(case: ScoredRow) -> str:
    return case.source if case.counts else f"{case.source} (tier C)"


def _group(
    cases: Sequence[ScoredRow], key: Callable[[ScoredRow], str], error: Callable[[ScoredRow], float | None]
) -> list[Errors]:
    groups: dict[str, list[ScoredRow]] = defaultdict(list)
    for case in cases:
        groups[key(case)].append(case)
    timed = error is _time_error
    return [
        summarise(name, [e for e in map(error, group) if e is not None], [_is_covered(c) for c in group] if timed else ())
        for name, group in sorted(groups.items())
    ]


def _is_covered(case: ScoredRow) -> bool:
    assert case.step_seconds and case.predicted.low is not None and case.predicted.high is not None
    return case.predicted.low <= case.step_seconds <= case.predicted.high


def _per_source_mean(cases: Sequence[ScoredRow]) -> list[Errors]:
    """Errors with equal weight for every source: means of the sources' own."""
    sources = _group(cases, lambda case: case.source, _time_error)
    if len(sources) < 2:
        return []
    names = ("median_absolute", "mean_absolute", "bias", "median_error", "p90_absolute", "covered")
    return [Errors("mean of sources", len(sources), *(fmean(getattr(source, name) for source in sources) for name in names))]


def _picks(cases: Sequence[ScoredRow]) -> list[Picks]:
    cells: dict[str, dict[tuple, list[ScoredRow]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        config = case.row.config
        batch = config.global_batch or (config.dp or 1) * (config.micro_batch or 1) * (config.grad_accum or 1)
        cell = (config.model, config.n_gpus or config.nodes, batch, config.seq_len, config.gpu)
        cells[case.source][cell].append(case)
    picks = []
    for source, by_cell in sorted(cells.items()):
        large = [cell for cell in by_cell.values() if len(cell) >= SMALLEST_CELL]
        if large:
            picks.append(_rank(source, large))
    return picks


def _rank(source: str, cells: Sequence[Sequence[ScoredRow]]) -> Picks:
    taus, regrets = [], []
    for cell in cells:
        measured = [case.step_seconds or 0.0 for case in cell]
        predicted = [case.predicted.step_seconds or 0.0 for case in cell]
        taus.append(kendall_tau(predicted, measured))
        fitting = [index for index, case in enumerate(cell) if case.predicted.fits] or range(len(cell))
        pick = min(fitting, key=lambda index: predicted[index])
        regrets.append(measured[pick] / min(measured) - 1)
    return Picks(
        source, len(cells), sum(map(len, cells)), median(taus), median(regrets), fmean(regrets),
        float(np.quantile(regrets, 0.9)),
    )  # fmt: skip


def _verdicts(cases: Sequence[ScoredRow]) -> list[Verdicts]:
    groups: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for case in cases:
        ran = _ran(case.row)
        if ran is not None and case.predicted.fits is not None:
            groups[case.source].append((ran, case.predicted.fits))
    every = [pair for pairs in groups.values() for pair in pairs]
    named = list(sorted(groups.items()))
    if len(groups) > 1:
        published = [pair for source, pairs in groups.items() if source != SCAN for pair in pairs]
        named += [(f"all but the {SCAN}", published)] * (SCAN in groups) + [("all rows", every)]
    return [
        Verdicts(
            name, pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, False)), pairs.count((False, True))
        )
        for name, pairs in named
    ]


def _ran(row: MeasuredRow) -> bool | None:
    """True if a run ran: from its outcome, else from whether it measured anything; None if unknown."""
    measured = row.measured
    if measured.outcome:
        return "oom" not in measured.outcome.lower() and "crash" not in measured.outcome.lower()
    return True if any(getattr(measured, name) is not None for name in MEASURED) else None
