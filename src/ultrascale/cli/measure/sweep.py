"""`ultrascale sweep`: measure many layouts of a run, beside the plan."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ultrascale.api.sweep import Begun, Sweep, SweepOptions, answer
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.description.units import count_of, format_bytes, format_seconds, format_share
from ultrascale.sweep.cells import Place
from ultrascale.sweep.grid import Axis, Cell, names_of, split_axes
from ultrascale.sweep.held import Held, Measured

MOST_REFUSED = 8
"""Reasons that are printed."""


def command(arguments: list[str]) -> int:
    """Run the verb: 0 if a cell has a result (or nothing was to be measured), 1 if none has, 2 if it is described wrongly."""
    axes, words = split_axes(arguments)
    options, rest = parse_with_overrides(SweepOptions, "sweep", words, positional={"run": "RUN.TOML"})
    with _ended_in_order():
        told = _Progress(sys.stderr if options.json else sys.stdout)
        found = answer(options, axes, rest, started=told.start, done=told)
    if options.json:
        print_json(found.to_dict(), indent=1)
    else:
        _show(found, options.top, options.html)
    return 0 if found.measured or options.list else 1


class _Progress:
    """A line of what is to be done, and one for every cell as it is done."""

    def __init__(self, stream: Any):
        self._count, self._stream, self._done = 0, stream, 0

    def start(self, begun: Begun) -> None:
        """Prints what will be measured."""
        count, places = len(begun.cells), begun.places
        self._count, known = len(places), sum(place.result is not None for place in places)
        parts = [count_of(count, "cell"), f"{count - len(places)} refused", f"{known} measured before"]
        parts += [f"{begun.same} left out, the same run as another"] * bool(begun.same)
        print(f"{', '.join(parts)}; in {begun.folder}", file=self._stream, flush=True)

    def __call__(self, place: Place) -> None:
        self._done += 1
        one, failure = Measured.of(place), place.failure
        came = "another command is at it" if failure is None else f"{failure.outcome}: {failure.text}"
        if one is not None:
            came = f"{format_seconds(one.step_seconds)} a step, {one.tokens_per_second_per_rank:,.0f} tokens/s a rank"
        print(f"[{self._done}/{self._count}] {words_of(place.cell)}: {came}", file=self._stream, flush=True)


def words_of(cell: Cell) -> str:
    """Values of a cell, in words."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in cell.values.items()) or "the run itself"


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """While inside, SIGTERM ends this process as Ctrl-C does: with the one it has started."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(found: Sweep, top: int, html: Path | None) -> None:

    console, measured = console_for_people(), found.measured
    if measured and top:
        console.print()
        console.print(_table(found.axes, measured[:top]))
        if len(measured) > top:
            console.print(f"and {len(measured) - top:,} slower ones; --top lists more")
    for line in (*_held_lines(found.held), *_failure_lines(found.begun.cells, found.begun.places)):
        console.print(line, soft_wrap=True, markup=False)
    console.print("\nfiles")
    for file in (found.table, *found.pictures, *([html] if html is not None else [])):
        console.print(f"  {file}", soft_wrap=True)
    if measured:
        console.print(f"next  ultrascale train {shlex.quote(str(measured[0].place.run_file))}", soft_wrap=True)


def _table(axes: Sequence[Axis], measured: Sequence[Measured]):
    from rich.table import Table

    planned_time = any(one.planned_step_seconds is not None for one in measured)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    columns = ["", "step", *(["planned"] if planned_time else []), "tokens/s a rank", "MFU", "memory", "planned"]
    for column in (*columns, *names_of(axes)):
        table.add_column(column, justify="right")
    for number, one in enumerate(measured, start=1):
        memory = "" if one.measured_peak_bytes is None else format_bytes(one.measured_peak_bytes)
        time = [] if not planned_time else [format_seconds(one.planned_step_seconds) if one.planned_step_seconds else ""]
        table.add_row(
            str(number), format_seconds(one.step_seconds), *time, f"{one.tokens_per_second_per_rank:,.0f}",
            format_share(one.mfu), memory, format_bytes(one.planned_peak_bytes),
            *(one.place.cell.values[axis.key] for axis in axes),
            style="bold" if number == 1 else "",
        )  # fmt: skip
    return table


def _held_lines(held: Held) -> Iterator[str]:
    """Lines with the error of the plan."""
    yield ""
    for name, one in (("memory", held.memory), ("reserved", held.reserved), ("step time", held.time)):
        if one is not None:
            half, most = f"{one.median_absolute:.1%} off at the median", f"nine in ten within {one.p90_absolute:.1%}"
            yield f"planned {name}: {half}, {most}, bias {one.bias:+.1%}, of {one.count}"
    if held.tau is not None and held.regret is not None:
        yield f"planned order: Kendall tau {held.tau:.2f}; the plan's choice is {held.regret:.1%} slower than the fastest"
    if len(held.machines) > 1:
        yield f"mixed: results are of {len(held.machines)} machines or versions: {'; '.join(held.machines)}"


def _failure_lines(found: Sequence[Cell], places: Sequence[Place]) -> Iterator[str]:
    """Lines with the failed and refused cells, by reason."""
    failed = [(place, failure) for place in places if place.result is None and (failure := place.failure) is not None]
    for place, failure in failed:
        yield f"{failure.outcome}: {words_of(place.cell)}: {failure.text} (what it printed: {place.log_file})"
    if failed:
        yield "--again measures these once more"
    reasons: dict[str, list[Cell]] = {}
    for cell in found:
        if cell.run is None:
            reasons.setdefault(f"{cell.problems[0].key}: {cell.problems[0].rule}", []).append(cell)
    for reason, some in list(reasons.items())[:MOST_REFUSED]:
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        yield f"refused: {words_of(some[0])}{more}: {reason}"
    if len(reasons) > MOST_REFUSED:
        yield f"and {len(reasons) - MOST_REFUSED} more reasons; --json has them all"
