"""Fit the numbers of the time model that only whole runs show, a source or a kind left out at a time, and write what is left.

    python benchmarks/plan/cross_validate.py measured_runs.csv measured_oom.csv playbook_runs.csv \
        --markdown docs/validation.md --collected benchmarks/plan/collected_runs.csv

Each such number (`plan.constants`, or `shared` by stacks' files) is a knob with a prior: what literature or arithmetic says of
it, and how far it may be from that. Knobs are fitted to the logarithm of measured over predicted time with a Huber loss, a
source of n rows weighing sqrt(n), by Gauss-Newton steps whose derivatives, taken once, come from pricing the rows that a knob
touches with it turned. The fit is repeated without each source in turn, and its rows are predicted with what the others say and
without everything that is written by hand about it (`validation/stated.toml`, stacks that only it judges): those errors are the
honest ones. The same is done for kinds: all mixtures of experts, all runs of one accelerator, one trainer, one year. Of the
playbook's scan the runs on few nodes are in the fits; the older one of the same program, most of whose pipelines waited for the
network of the day, is not.

Rows of `--collected` take part in no fit here: strangers found them, blind. They have a table of their own, and intervals are
as wide as their errors and those of sources left out ask for together.

The knobs in the code are set by hand from what this prints.
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray
from validation_tables import Fold, write_markdown

from ultrascale.catalogue.stacks.stack_files import program_of, settings_of, stack_file, stack_names
from ultrascale.plan.intervals import COVERAGE
from ultrascale.validation.cells.programs import TUNING, Tuning
from ultrascale.validation.cells.stated import SCAN
from ultrascale.validation.predict import RowPrediction, predict_rows
from ultrascale.validation.rows import MeasuredRow, read_rows
from ultrascale.validation.scores import Errors, ScoredRow, Verdicts, score, summarise
from ultrascale.validation.setups import setup_of

Floats = NDArray[np.float64]
HUBER = 0.15
"""Log error beyond which a row pulls with constant force: about the noise between releases of one trainer."""
TURN = 0.1
"""How far a knob is turned for a derivative, in its own scale."""
ROUNDS = 2
OLDER_SCAN = "hf-bench-cluster"
MOST_NODES_OF_SCAN = 2
OF_SCAN = "eager on many nodes"
SMALLEST_KIND = 5
"""Rows of a kind below which it is not left out as one."""
MARGINS = (0.0, 0.04, 0.07, 0.10, 0.13, 0.16, 0.20)
"""Tried for the table; `plan.columns.footprint.MARGIN` is the one in the code."""


@dataclass(frozen=True)
class Knob:
    """A number to fit."""

    owner: str
    """constants, device, or shared."""
    name: str
    prior: float
    spread: float
    """Standard deviation of its prior, in its scale."""
    is_share: bool = False
    """Between 0 and 1, and fitted as its log odds; others as their logarithm."""

    def scaled(self, value: float) -> float:
        return float(np.log(value / (1 - value)) if self.is_share else np.log(value))

    def value(self, x: float) -> float:
        return float(1 / (1 + np.exp(-x)) if self.is_share else np.exp(x))

    def in_code(self) -> float:
        if self.owner == "device":
            return TUNING.constants.device_derates.get(self.name, 1.0)
        if self.owner == "shared":
            return next(_shared_values(self.name))
        return getattr(TUNING.constants, self.name)


def _shared_values(name: str) -> Iterator[float]:
    """The value that each stack has of a number that several have."""
    for file in map(stack_file, stack_names()):
        yield from (settings_of(file.stack)[key] for key, shared in file.shared.items() if shared == name)


KNOBS = (
    Knob("constants", "compute_derate", 1.06, 0.05),
    Knob("constants", "tensor_parallel_hidden", 0.2, 0.7, is_share=True),
    Knob("constants", "data_parallel_window", 0.9, 0.7, is_share=True),
    Knob("constants", "overlap_slowdown", 0.15, 0.5),  # Calculon
    Knob("constants", "straggler_per_doubling", 0.006, 0.7),
    Knob("constants", "optimizer_passes", 1.2, 0.3),
    Knob("device", "b200", 1.06, 0.1),
    Knob("shared", "flash attention 1", 1.7, 0.3),  # Dao 2023
    Knob("shared", "eager bytes", 1.0, 0.7),
    Knob("shared", "eager launches", 4e-5, 1.0),
    Knob("shared", "expert launches", 1.1e-4, 1.0),  # a dispatch is torch's own operations, as those of eager programs
    Knob("shared", "fused permutation", 0.7, 0.3),  # one host wait of two, and few of its many kernels
)


@dataclass(frozen=True)
class Data:
    """Rows whose time is known, and is to be fitted."""

    rows: list[MeasuredRow]
    sources: NDArray[np.str_]
    log_measured: Floats


def tuning_at(x: Floats) -> Tuning:
    """All constants with the knobs at `x`."""
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for knob, at in zip(KNOBS, x, strict=True):
        changes[knob.owner][knob.name] = knob.value(at)
    devices = {**TUNING.constants.device_derates, **changes["device"]}
    constants = replace(TUNING.constants, device_derates=devices, **changes["constants"])
    return Tuning(constants, changes["shared"])


def fittable(rows: Iterable[MeasuredRow]) -> Data:
    """Rows whose source prints a time, or FLOPs per second, of tiers A and B."""
    rows = list(rows)
    kept, sources, measured = [], [], []
    for row, one in zip(rows, predict_rows([row.config for row in rows]), strict=True):
        case = ScoredRow(row, one)
        seconds = case.step_seconds or _from_rate(case)
        if seconds and one.step_seconds and case.counts:
            kept.append(row)
            sources.append(case.source)
            measured.append(seconds)
    return Data(kept, np.array(sources), np.log(np.array(measured)))


def _from_rate(case: ScoredRow) -> float | None:
    """The step time that a printed FLOP/s implies."""
    measured, one = case.row.measured, case.predicted
    rate = measured.tflops_per_gpu or (measured.mfu_reported or 0) * (measured.mfu_peak_tflops or 0)
    if not rate or not one.step_seconds or not one.flops_per_second_per_gpu:
        return None
    return one.step_seconds * one.flops_per_second_per_gpu / (rate * 1e12)


def log_predicted(data: Data, x: Floats) -> Floats:
    return _log_seconds(data.rows, tuning_at(x))


def _log_seconds(rows: Sequence[MeasuredRow], tuning: Tuning) -> Floats:
    return np.log(np.array([one.step_seconds for one in predict_rows([row.config for row in rows], tuning)], dtype=float))


def jacobian(data: Data, x: Floats, base: Floats) -> Floats:
    """Derivatives of log predictions by knobs, [rows, knobs]."""
    slopes, before = np.zeros((len(data.rows), len(x))), tuning_at(x)
    turned = [tuning_at(x + TURN * unit) for unit in np.eye(len(x))]
    touched = [
        [index for index, row in enumerate(data.rows) if _touches(knob, row, before, after)]
        for knob, after in zip(KNOBS, turned, strict=True)
    ]
    found = in_processes(_log_seconds, [[data.rows[i] for i in rows] for rows in touched], turned)
    for column, (rows, logs) in enumerate(zip(touched, found, strict=True)):
        slopes[rows, column] = (logs - base[rows]) / TURN
    return slopes


def _touches(knob: Knob, row: MeasuredRow, before: Tuning, after: Tuning) -> bool:
    """Whether the row's prediction can depend on the knob, by what is priced for it."""
    if knob.owner == "constants":
        return True
    setup = setup_of(row.config, before)
    if knob.owner == "device":
        return any(one.cluster.accelerator.kind == knob.name for one in setup.workloads)
    return setup != setup_of(row.config, after)


def in_processes(function: Callable[..., Any], *arguments: Iterable[Any]) -> list[Any]:
    """`map` with a process for each core."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(function, *arguments))


def solve(data: Data, x: Floats, base: Floats, slopes: Floats, keep: NDArray[np.bool_]) -> Floats:
    """Where the knobs go from `x` if only the rows of `keep` count: Huber loss and Gaussian priors, predictions linear in x."""
    start, spread = prior(), np.array([knob.spread for knob in KNOBS])
    counts = {source: (data.sources[keep] == source).sum() for source in np.unique(data.sources)}
    of_source = np.array([1 / np.sqrt(max(counts[source], 1)) for source in data.sources]) * keep
    residual, step = data.log_measured - base, np.zeros(len(x))
    for _ in range(30):
        weight = of_source / np.maximum(np.abs(residual - slopes @ step) / HUBER, 1.0) / HUBER**2
        matrix = (slopes * weight[:, None]).T @ slopes + np.diag(1 / spread**2)
        step = np.linalg.solve(matrix, (slopes * weight[:, None]).T @ residual - (x - start) / spread**2)
    return x + step


def prior() -> Floats:
    return np.array([knob.scaled(knob.prior) for knob in KNOBS])


def cross_validate(data: Data) -> tuple[Floats, dict[str, Floats], list[RowPrediction], dict[str, Errors]]:
    """The knobs fitted on all sources but the scan; those of each fit without one; every row predicted without its source; and
    the errors of every kind predicted without that kind."""
    outside = np.array([is_fitted(row, source) for row, source in zip(data.rows, data.sources, strict=True)])
    fitted = Data(
        [row for row, keep in zip(data.rows, outside, strict=True) if keep], data.sources[outside], data.log_measured[outside]
    )
    x = np.array([knob.scaled(knob.in_code()) for knob in KNOBS])
    everything, base = np.ones(len(fitted.rows), dtype=bool), log_predicted(fitted, x)
    slopes = jacobian(fitted, x, base)
    last, x = x, solve(fitted, x, base, slopes, everything)
    for _ in range(ROUNDS - 1):
        base = log_predicted(fitted, x)
        last, x = x, solve(fitted, x, base, slopes, everything)
    folds = {OLDER_SCAN: x} | {
        str(source): solve(fitted, last, base, slopes, fitted.sources != source) for source in np.unique(fitted.sources)
    }
    where = [np.flatnonzero(data.sources == source).tolist() for source in folds]
    tunings = [replace(tuning_at(at), without=frozenset((source,))) for source, at in folds.items()]
    each = in_processes(predict_rows, [[data.rows[i].config for i in index] for index in where], tunings)
    found = {i: one for index, those in zip(where, each, strict=True) for i, one in zip(index, those, strict=True)}
    kinds = _without_kinds(data, fitted, lambda keep: solve(fitted, last, base, slopes, keep))
    return x, folds, [found[i] for i in range(len(data.rows))], kinds


def is_fitted(row: MeasuredRow, source: str) -> bool:
    """Whether a row takes part in fits: of the scan those on few nodes, where nothing stopped and no network was full."""
    return source != OLDER_SCAN and (source != SCAN or (row.config.nodes or 0) <= MOST_NODES_OF_SCAN)


def _without_kinds(data: Data, fitted: Data, fit: Callable[[NDArray[np.bool_]], Floats]) -> dict[str, Errors]:
    """Errors of every kind of run, fitted without all of it and without what is written of its sources."""
    where: dict[str, list[int]] = {}
    for kind in sorted({kind for row in data.rows for kind in kinds_of(row)}):
        index = [i for i, row in enumerate(data.rows) if kind in kinds_of(row) and data.sources[i] not in (SCAN, OLDER_SCAN)]
        if len(index) >= SMALLEST_KIND:
            where[kind] = index
    tunings = [
        replace(
            tuning_at(fit(np.array([kind not in kinds_of(row) for row in fitted.rows]))),
            without=frozenset(data.sources[index].tolist()),
        )
        for kind, index in where.items()
    ]
    each = in_processes(predict_rows, [[data.rows[i].config for i in index] for index in where.values()], tunings)
    found = {}
    for (kind, index), predicted in zip(where.items(), each, strict=True):
        measured = np.exp(data.log_measured[index])
        errors = [(one.step_seconds or 0.0) / seconds - 1 for one, seconds in zip(predicted, measured, strict=True)]
        found[kind] = summarise(kind, errors)
    return found


def kinds_of(row: MeasuredRow) -> list[str]:
    """What kinds a run is of: its sort of model, accelerator, trainer and year."""
    config, program = row.config, program_of(row.config.framework)
    return [
        "model: experts" if config.experts else "model: dense", f"accelerator: {config.gpu_family or config.gpu}",
        f"trainer: {program[0] if program else 'unnamed'}", f"year: {config.year}",
    ]  # fmt: skip


def interval_factors(data: Data, predictions: Sequence[RowPrediction]) -> dict[str, tuple[float, float, float]]:
    """By kind of run: lower and upper factor, and the share they cover of sources that had no part in them.

    The quantiles are those of the lowest level that covers `COVERAGE` of the sources left out.
    """
    kinds = np.array([one.kind for one in predictions])
    ratios = data.log_measured - np.log(np.array([one.step_seconds for one in predictions], dtype=float))
    found = {}
    for kind in np.unique(kinds):
        values, sources = ratios[kinds == kind], data.sources[kinds == kind]
        for level in np.arange(COVERAGE, 1.0, 0.01):
            covered = _covered(values, sources, level)
            if not covered < COVERAGE:
                break
        low, high = np.exp(_quantiles(values, sources, level))
        found[str(kind)] = (float(low), float(high), covered)
    return found


def _covered(values: Floats, sources: NDArray[np.str_], level: float) -> float:
    """The share of each source between the quantiles of the others, averaged; NaN if there are no others."""
    names, counts = np.unique(sources, return_counts=True)
    if len(names) < 2:
        return float("nan")
    inside = []
    for name in names:
        low, high = _quantiles(values[sources != name], sources[sources != name], level)
        own = values[sources == name]
        inside.append(((own >= low) & (own <= high)).mean())
    return float(np.average(inside, weights=np.sqrt(counts)))


def _quantiles(values: Floats, sources: NDArray[np.str_], level: float) -> tuple[float, float]:
    """The two quantiles that hold `level`, a source of n rows weighing sqrt(n)."""
    names, counts = np.unique(sources, return_counts=True)
    weight = 1 / np.sqrt(counts[np.searchsorted(names, sources)])
    order = np.argsort(values)
    share = (np.cumsum(weight[order]) - weight[order] / 2) / weight.sum()
    low, high = np.interp([(1 - level) / 2, (1 + level) / 2], share, values[order])
    return float(low), float(high)


def main(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional], /, collected: Path, markdown: Path | None = None
) -> int:  # fmt: skip
    """Fit, cross-validate and print.

    Args:
        files: CSV files of measured runs.
        collected: CSV file of runs that no fit sees.
        markdown: Write the tables into this file, between its two markers.
    """
    if markdown is not None and not markdown.is_file():
        raise SystemExit(f"{markdown} is not there: the tables go between two markers of a file that is")
    rows = [row for file in files for row in read_rows(file)]
    data = fittable(rows)
    x, folds, left_out, kinds = cross_validate(data)
    shipped = predict_rows([row.config for row in data.rows])
    for index, knob in enumerate(KNOBS):
        ends = [knob.value(one[index]) for one in folds.values()]
        numbers = f"{knob.in_code():9.4g} in the code {knob.value(x[index]):9.4g} fitted {min(ends):9.4g} .. {max(ends):.4g}"
        print(f"{knob.owner + ' ' + knob.name:36s} {numbers}")
    # Nothing else is of the scan's kind: on many nodes its own errors are all there is to tell them by.
    own = [a if a.kind == OF_SCAN else b for a, b in zip(shipped, left_out, strict=True)]
    unseen_rows = list(read_rows(collected))
    unseen, unseen_predictions = fittable(unseen_rows), predict_rows([row.config for row in unseen_rows])
    both = Data(
        data.rows + unseen.rows,
        np.concatenate([data.sources, unseen.sources]),
        np.concatenate([data.log_measured, unseen.log_measured]),
    )
    factors = interval_factors(both, [*own, *predict_rows([row.config for row in unseen.rows])])
    for kind, (low, high, covered) in factors.items():
        print(f"interval {kind:20s} {low:.3f} .. {high:.3f} covers {covered:.0%} of sources left out")
    table = _folds(data, shipped, left_out)
    for fold in table:
        ends = "   ".join(f"{one.median_absolute:6.1%} {one.median_error:+6.1%}" for one in (fold.in_code, fold.left_out))
        print(f"{fold.source:26s} {fold.in_code.count:5d}   {ends}")
    for one in kinds.values():
        print(f"without {one.group:30s} {one.count:5d}   {one.median_absolute:6.1%} {one.median_error:+6.1%}")
    report = score(unseen_rows, unseen_predictions)
    for one in (*report.time["source"], *report.time["all"]):
        print(
            f"collected {one.group:28s} {one.count:5d}   {one.median_absolute:6.1%} {one.median_error:+6.1%} {one.covered:6.0%}"
        )
    print(f"mean of sources, left out: {fmean(fold.left_out.median_absolute for fold in table[:-2]):.1%}")
    if markdown is not None:
        predictions = predict_rows([row.config for row in rows])
        write_markdown(markdown, score(rows, predictions), table, kinds, factors, _margins(rows, predictions), report)
    return 0


def _margins(rows: Sequence[MeasuredRow], predictions: Sequence[RowPrediction]) -> dict[float, list[Verdicts]]:
    """Verdicts on all rows, and on those of which it is known why they failed, by the share of a device that is kept free. What
    a row leaves open is chosen once, with `footprint.MARGIN`."""
    found = {}
    for margin in MARGINS:
        fits = [replace(one, fits=one.needed_share <= 1 - margin) if one.needed_share else one for one in predictions]
        found[margin] = [one for one in score(rows, fits).verdicts if one.group.startswith("all")]
    return found


def _folds(data: Data, shipped: Sequence[RowPrediction], left_out: Sequence[RowPrediction]) -> list[Fold]:
    """Errors by source, of the constants in the code and of those fitted without it."""
    measured = np.exp(data.log_measured)
    found = []
    named = [(str(source), np.flatnonzero(data.sources == source).tolist()) for source in np.unique(data.sources)]
    published = np.flatnonzero(data.sources != SCAN).tolist()
    for source, index in (*named, ("all but the playbook", published), ("all rows", list(range(len(data.rows))))):
        both = [
            summarise(source, [(one[i].step_seconds or 0.0) / measured[i] - 1 for i in index]) for one in (shipped, left_out)
        ]
        found.append(Fold(source, both[0], both[1]))
    return found


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
