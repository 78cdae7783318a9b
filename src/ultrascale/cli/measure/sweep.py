"""`ultrascale sweep`: measures many layouts of a run, compared with the plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any

from ultrascale.api.sweep import Sweep, SweepGrid, SweepOptions, answer
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, ending_like_ctrl_c, print_json
from ultrascale.console import plain_table
from ultrascale.description.units import count_of, format_bytes, format_seconds, format_share
from ultrascale.sweep.accuracy import Held, MeasuredCell
from ultrascale.sweep.cells import CellPlace
from ultrascale.sweep.grid import Axis, SweepCell, names_of, split_axes

if TYPE_CHECKING:
    from rich.table import Table

MOST_REFUSED = 8
"""Most reasons printed."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if a cell has a result (or nothing was to be measured), 1 if none has, 2 if the configuration is
    invalid."""
    axes, words = split_axes(arguments)
    options, overrides = parse_with_overrides(SweepOptions, "sweep", words, positional={"run": "RUN.TOML"})
    with ending_like_ctrl_c(SIGTERM):
        progress = _Progress(sys.stderr if options.json else sys.stdout)
        sweep = answer(options, axes, overrides, started=progress.start, done=progress)
    if options.json:
        print_json(sweep.to_dict(), indent=1)
    else:
        _show(sweep, options.top, options.html)
    return 0 if sweep.measured or options.list else 1


class _Progress:
    """Prints the planned cells, and a line for every finished one."""

    def __init__(self, stream: Any):
        self._count, self._stream, self._done = 0, stream, 0

    def start(self, grid: SweepGrid) -> None:
        """Print the cells to be measured."""
        count, places = len(grid.cells), grid.places
        self._count, known = len(places), sum(place.result is not None for place in places)
        parts = [count_of(count, "cell"), f"{count - len(places)} refused", f"{known} measured before"]
        parts += [f"{grid.num_duplicates} left out, the same run as another"] * bool(grid.num_duplicates)
        print(f"{', '.join(parts)}; in {grid.folder}", file=self._stream, flush=True)

    def __call__(self, place: CellPlace) -> None:
        self._done += 1
        measured, failure = MeasuredCell.of(place), place.failure
        outcome = "another command is at it" if failure is None else f"{failure.outcome}: {failure.text}"
        if measured is not None:
            outcome = (
                f"{format_seconds(measured.step_seconds)} a step, {measured.tokens_per_second_per_rank:,.0f} tokens/s a rank"
            )
        print(f"[{self._done}/{self._count}] {words_of(place.cell)}: {outcome}", file=self._stream, flush=True)


def words_of(cell: SweepCell) -> str:
    """Values of a cell as text."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in cell.values.items()) or "the run itself"


def _show(sweep: Sweep, top: int, html: Path | None) -> None:
    console, measured = console_for_people(), sweep.measured
    if measured and top:
        console.print()
        console.print(_table(sweep.axes, measured[:top]))
        if len(measured) > top:
            console.print(f"and {len(measured) - top:,} slower ones; --top lists more")
    lines = [*_plan_error_lines(sweep.held), *_failure_lines(sweep.grid.cells, sweep.grid.places)]
    for line in ("", *lines) if lines else ():
        console.print(line, soft_wrap=True, markup=False)
    console.print("\nfiles")
    for file in (sweep.table, *sweep.pictures, *([html] if html is not None else [])):
        console.print(f"  {file}", soft_wrap=True)
    if measured:
        console.print(f"next  ultrascale train {shlex.quote(str(measured[0].place.run_file))}", soft_wrap=True)


def _table(axes: Sequence[Axis], measured: Sequence[MeasuredCell]) -> Table:
    planned_time = any(cell.planned_step_seconds is not None for cell in measured)
    columns = ["", "step", *(["planned"] if planned_time else []), "tokens/s a rank", "MFU", "memory", "planned"]
    table = plain_table(*columns, *names_of(axes), left=(), padding=(0, 2, 0, 0))
    for number, cell in enumerate(measured, start=1):
        memory = "" if cell.measured_peak_bytes is None else format_bytes(cell.measured_peak_bytes)
        time = [] if not planned_time else [format_seconds(cell.planned_step_seconds) if cell.planned_step_seconds else ""]
        table.add_row(
            str(number), format_seconds(cell.step_seconds), *time, f"{cell.tokens_per_second_per_rank:,.0f}",
            format_share(cell.mfu), memory, format_bytes(cell.planned_peak_bytes),
            *(cell.place.cell.values[axis.key] for axis in axes),
            style="bold" if number == 1 else "",
        )  # fmt: skip
    return table


def _plan_error_lines(scores: Held) -> Iterator[str]:
    """Lines with the error of the plan."""
    for name, error in (("memory", scores.memory), ("reserved", scores.reserved), ("step time", scores.time)):
        if error is not None:
            typical, most = f"median error {error.median_absolute:.1%}", f"90th percentile {error.p90_absolute:.1%}"
            mean = f"mean {round(error.bias, 3) + 0.0:+.1%}"
            yield f"planned {name}: {typical}, {most}, {mean}, over {count_of(error.count, 'cell')}"
    if scores.tau is not None and scores.regret is not None:
        yield f"planned order: Kendall tau {scores.tau:.2f}; the plan's choice is {scores.regret:.1%} slower than the fastest"
    if len(scores.machines) > 1:
        yield f"mixed: results are of {len(scores.machines)} machines or versions: {'; '.join(scores.machines)}"


def _failure_lines(cells: Sequence[SweepCell], places: Sequence[CellPlace]) -> Iterator[str]:
    """Lines with the failed and refused cells, by reason."""
    failed = [(place, failure) for place in places if place.result is None and (failure := place.failure) is not None]
    for place, failure in failed:
        yield f"{failure.outcome}: {words_of(place.cell)}: {failure.text} (what it printed: {place.log_file})"
    if failed:
        yield "--again measures these once more"
    reasons: dict[str, list[SweepCell]] = {}
    for cell in cells:
        if cell.run is None:
            reasons.setdefault(f"{cell.problems[0].key}: {cell.problems[0].rule}", []).append(cell)
    for reason, refused in list(reasons.items())[:MOST_REFUSED]:
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        yield f"refused: {words_of(refused[0])}{more}: {reason}"
    if len(reasons) > MOST_REFUSED:
        yield f"and {len(reasons) - MOST_REFUSED} more reasons; --json has them all"
