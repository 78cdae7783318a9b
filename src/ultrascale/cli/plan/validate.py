"""`ultrascale validate`: compares predictions with measured runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.description.problems import mistake
from ultrascale.description.units import first_few

if TYPE_CHECKING:
    from rich.table import Table

    from ultrascale.validation.scores import Errors, Picks, ValidationReport, Verdicts

NAMES = 24
"""Columns for the names of groups: on a narrow terminal names and headers wrap, while numbers are never cut."""
MOST_REASONS, MOST_NAMED = 20, 12
"""Most reasons printed for rows without a prediction, and most rows of each; --out and --json have all."""
Files = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help_behavior_hint="(required)")]


def validate(
    files: Files, /, json: bool = False, out: Path | None = None, overwrite: bool = False
) -> int:  # fmt: skip
    """Predict every run in CSV files without reading its result, then report the error of the predictions.

    For example:

        ultrascale validate runs.csv --out predictions.csv

    A file has the columns of published runs (model, n_gpus, tp, pp, dp, seq_len, ...) or those of the playbook's scan (model,
    nodes, mbs, ga, ...); a column `stack` names a framework (`ultrascale show stacks`), `stack.KEY` changes one of its
    settings. Blank cells are inferred, which the prediction reports. Predictions are compared with step_time_s,
    tokens_per_s_per_gpu, tflops_per_gpu, mfu_reported (0 to 1) and peak_mem_gib, as far as a row has them; --out has every
    prediction.

    Args:
        files: CSV files of measured runs.
        json: Print one JSON object.
        out: Write a prediction for every row to this CSV file: step time in seconds, tokens/s per GPU, MFU, peak memory in GiB,
            whether it fits, the prediction interval of the step time (low, high), and the assumptions.
        overwrite: Allow --out to replace a file.
    """
    from ultrascale.validation.predict import predict_rows, write_predictions
    from ultrascale.validation.rows import MEASURED, is_unmeasured, misspelt_columns, read_rows
    from ultrascale.validation.scores import score

    if not files:
        raise mistake("validate", "no file is given", "Name a CSV file: ultrascale validate runs.csv")
    if out is not None:
        _check_writable(out, overwrite=overwrite)
    read = {file: read_rows(file) for file in files}
    rows = [row for file in files for row in read[file]]
    for file in files:
        for name, meant in misspelt_columns(file):
            print(f"note: {file}: nobody reads the column {name}. Did you mean {meant}?", file=sys.stderr)
        if is_unmeasured(read[file]):
            print(f"note: {file}: has nothing to compare with in {', '.join(MEASURED)}.", file=sys.stderr)
    predictions = predict_rows([row.config for row in rows])
    if out is not None:
        write_predictions(out, rows, predictions)
    report = score(rows, predictions)
    if json:
        print_json(asdict(report), "validate", indent=2)
    else:
        _show(report, out)
    return 0


command = partial(parse, validate, "validate")
"""Run the verb; returns its exit code."""


def _check_writable(out: Path, *, overwrite: bool) -> None:
    """Raises SpecError, before anything is predicted, if the output would replace a file or has no folder."""
    if out.is_dir():
        raise mistake("out", f"{out} is a folder", "Name a file in it.")
    if out.is_file() and out.stat().st_size and not overwrite:
        raise mistake("out", f"{out} is there already", "Name another file, or say --overwrite.")
    if not out.parent.is_dir():
        raise mistake("out", f"there is no folder {out.parent}", "Make it, or name another file.")


def _show(report: ValidationReport, out: Path | None) -> None:

    console = console_for_people()
    console.print(f"[bold]{report.rows:,} runs[/bold], {report.rows - len(report.unrepresentable):,} predicted blind")
    errors = {f"step time: {name}": groups for name, groups in report.time.items()}
    errors |= {"FLOP/s of runs that print no time": report.rate, "peak memory, by instrument": report.memory}
    tables = [_errors(title, groups) for title, groups in errors.items() if groups]
    if report.picks:
        tables.append(_picks(report.picks))
    if report.verdicts:
        tables.append(_verdicts(report.verdicts))
    for table in tables:
        console.print()
        console.print(table)
    _print_rows_without(console, report.unrepresentable)
    if out is not None:
        console.print(f"\npredictions: {out}", soft_wrap=True)


def _print_rows_without(console, rows: list[tuple[str, str]]) -> None:
    """Print rows without a prediction, by reason."""
    if not rows:
        return
    console.print(f"\n[bold]{len(rows):,} row{'s' * (len(rows) > 1)} without a time[/bold]; --out FILE and --json name each")
    reasons: dict[str, list[str]] = {}
    for identity, reason in rows:
        reasons.setdefault(reason, []).append(identity)
    for reason, names in list(reasons.items())[:MOST_REASONS]:
        console.print(f"  {first_few(names, MOST_NAMED)}: {reason}", soft_wrap=True, markup=False)
    if len(reasons) > MOST_REASONS:
        console.print(f"  and {len(reasons) - MOST_REASONS:,} more reasons")


def _table(title: str, names: list[str], *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_style="bold", title_justify="left", box=None, header_style="dim", padding=(0, 2, 0, 0))
    # A fixed width: headers wrap instead.
    table.add_column("", width=min(NAMES, max(map(len, names))), overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _errors(title: str, groups: list[Errors]) -> Table:
    table = _table(
        title, [errors.group for errors in groups], "rows", "median |e|", "mean |e|", "bias", "p90 |e|", "in interval"
    )
    for errors in groups:
        covered = "" if errors.covered is None else f"{errors.covered:.0%}"
        numbers = (
            f"{errors.median_absolute:.1%}",
            f"{errors.mean_absolute:.1%}",
            f"{errors.bias:+.1%}",
            f"{errors.p90_absolute:.1%}",
        )
        table.add_row(errors.group, f"{errors.count:,}", *numbers, covered)
    return table


def _picks(groups: list[Picks]) -> Table:
    names = [picks.group for picks in groups]
    columns = ("cells", "rows", "Kendall tau", "regret", "mean", "p90")
    table = _table("picks within cells of equal model, GPUs and batch", names, *columns)
    for picks in groups:
        regrets = (f"{picks.median_regret:.1%}", f"{picks.mean_regret:.1%}", f"{picks.p90_regret:.1%}")
        table.add_row(picks.group, str(picks.cells), f"{picks.rows:,}", f"{picks.median_tau:.2f}", *regrets)
    return table


def _verdicts(groups: list[Verdicts]) -> Table:
    columns = ("ran: fits", "ran: too large", "failed: too large", "failed: fits", "caught", "false alarms")
    table = _table("does it fit", [verdicts.group for verdicts in groups], *columns)
    for verdicts in groups:
        shares = ("" if share is None else f"{share:.1%}" for share in (verdicts.recall, verdicts.false_alarms))
        counts = (
            verdicts.ran_and_fits,
            verdicts.ran_but_called_too_large,
            verdicts.failed_and_called_too_large,
            verdicts.failed_but_fits,
        )
        table.add_row(verdicts.group, *(f"{count:,}" for count in counts), *shares)
    return table
