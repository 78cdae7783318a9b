"""The tables of `docs/validation.md`, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ultrascale.plan.intervals import COVERAGE, FACTORS
from ultrascale.validation.scores import Errors, Picks, ValidationReport, Verdicts

START, END = "<!-- made by benchmarks/plan/cross_validate.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Fold:
    """A source's step times, with the constants in the code and with those fitted without it."""

    source: str
    in_code: Errors
    left_out: Errors


def write_markdown(
    path: Path, report: ValidationReport, folds: Sequence[Fold], kinds: Mapping[str, Errors],
    intervals: Mapping[str, tuple[float, float, float]],
    margins: Mapping[float, Sequence[Verdicts]],
    collected: ValidationReport,
) -> None:  # fmt: skip
    """Put the tables between the two markers of a file; the rest of it stays. `collected`: of runs that no fit saw."""
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    body = "\n\n".join(
        (_folds(folds), _collected(collected), _errors("A whole kind left out", list(kinds.values())),
         _intervals(report, intervals), _memory(report.memory), _verdicts(report.verdicts), _margins(margins),
         _picks(report.picks), _errors("Accelerator", report.time["accelerator"]), _missing(report))
    )  # fmt: skip
    path.write_text(f"{before}{START}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None or value != value:  # not a number: there was nothing to compare with
        return ""
    return f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"


def _folds(folds: Sequence[Fold]) -> str:
    header = ("Step time, % off", "rows", "median", "mean", "bias", "p90", "median, left out", "bias, left out")
    rows = [
        (fold.source, f"{one.count:,}", _percent(one.median_absolute), _percent(one.mean_absolute),
         _percent(one.median_error, signed=True), _percent(one.p90_absolute), _percent(fold.left_out.median_absolute),
         _percent(fold.left_out.median_error, signed=True))
        for fold in folds for one in (fold.in_code,)
    ]  # fmt: skip
    return _table(header, rows)


def _errors(title: str, groups: Sequence[Errors]) -> str:
    header = (f"{title}, % off", "rows", "median", "mean", "bias", "p90")
    rows = [
        (one.group, f"{one.count:,}", _percent(one.median_absolute), _percent(one.mean_absolute),
         _percent(one.median_error, signed=True), _percent(one.p90_absolute))
        for one in groups
    ]  # fmt: skip
    return _table(header, rows)


def _collected(report: ValidationReport) -> str:
    header = ("Collected runs, step time, % off", "rows", "median", "mean", "bias", "p90", "in the interval, %")
    rows = [
        (one.group, f"{one.count:,}", _percent(one.median_absolute), _percent(one.mean_absolute),
         _percent(one.median_error, signed=True), _percent(one.p90_absolute), _percent(one.covered))
        for one in (*report.time["source"], *report.time["all"])
    ]  # fmt: skip
    return f"{_table(header, rows)}\n\n{_errors('Collected runs, peak memory', report.memory)}"


def _memory(groups: Sequence[Errors]) -> str:
    return _errors("Peak memory by instrument", groups)


def _intervals(report: ValidationReport, fresh: Mapping[str, tuple[float, float, float]]) -> str:
    header = (
        "Interval of step time",
        "in the code",
        "found now",
        f"covers %, of {100 * COVERAGE:.0f} claimed",
        "of sources left out, %",
    )
    covered = {one.group: one.covered for one in report.time["kind"]}
    rows = [
        (kind, f"{low:.2f} to {high:.2f}", "{:.2f} to {:.2f}".format(*fresh[kind][:2]) if kind in fresh else "",
         _percent(covered.get(kind)), _percent(fresh[kind][2]) if kind in fresh else "")
        for kind, (low, high) in FACTORS.items()
    ]  # fmt: skip
    return _table(header, rows)


def _verdicts(groups: Sequence[Verdicts]) -> str:
    header = ("Does it fit?", "ran, called fit", "ran, called too large", "failed, called too large", "failed, called fit",
              "caught %", "false alarms %")  # fmt: skip
    rows = [
        (one.group, f"{one.ran_and_fits:,}", f"{one.ran_but_called_too_large:,}", f"{one.failed_and_called_too_large:,}",
         f"{one.failed_but_fits:,}", _percent(one.recall), _percent(one.false_alarms))
        for one in groups
    ]  # fmt: skip
    return _table(header, rows)


def _margins(margins: Mapping[float, Sequence[Verdicts]]) -> str:
    header = ["Share of the device kept free, %"]
    names = [one.group for one in next(iter(margins.values()))]
    header += [f"{name}: {what} %" for name in names for what in ("caught", "false alarms")]
    rows = [
        (f"{100 * margin:.0f}", *(_percent(value) for one in groups for value in (one.recall, one.false_alarms)))
        for margin, groups in margins.items()
    ]
    return _table(header, rows)


def _picks(groups: Sequence[Picks]) -> str:
    header = ("Picks within cells", "cells", "rows", "Kendall tau", "regret %, median", "mean", "p90")
    rows = [
        (one.group, str(one.cells), f"{one.rows:,}", f"{one.median_tau:.2f}", _percent(one.median_regret),
         _percent(one.mean_regret), _percent(one.p90_regret))
        for one in groups
    ]  # fmt: skip
    return _table(header, rows)


def _missing(report: ValidationReport) -> str:
    reasons: dict[str, int] = {}
    for _, reason in report.unrepresentable:
        reasons[reason] = reasons.get(reason, 0) + 1
    rows = [(reason, str(count)) for reason, count in sorted(reasons.items(), key=lambda item: -item[1])]
    return _table(("Rows without a time", "rows"), rows) if rows else "Every row has a time."
