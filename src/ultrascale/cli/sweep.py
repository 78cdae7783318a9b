"""`ultrascale sweep`: measure many layouts of a run, beside the plan."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from ultrascale.cli.measure_speed import TIMED, WARM
from ultrascale.cli.parse import parse_with_overrides
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.rank_environment import told_world
from ultrascale.spec.units import format_bytes, format_seconds, format_share
from ultrascale.sweep.cells import Place, place_of
from ultrascale.sweep.grid import Axis, Cell, cells, names_of, split_axes
from ultrascale.sweep.held import Held, Measured, fastest_first, hold
from ultrascale.sweep.measured import measure_cells
from ultrascale.sweep.rows import write_rows

MOST_REFUSED = 8
"""Reasons that are printed."""


def sweep(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")],
    /,
    steps: int = TIMED,
    warm: int = WARM,
    processes: int | None = None,
    minutes: float = 10.0,
    out: Path | None = None,
    list: bool = False,
    again: bool = False,
    top: int = 20,
    json: bool = False,
) -> tuple[str, int, int, int | None, float, Path | None, bool, bool, int, bool]:
    """Measure every combination of settings that are given several values, and say how far off the plan was.

    Any setting can have several values, with commas between:

        ultrascale sweep run.toml --layout.zero-stage 0,1,2,3 --layout.micro-batch-size 1,2
        ultrascale sweep run.toml --processes 4 --layout.tp 1,2,4 --layout.pp 1,2

    Each cell is a process of its own that does what `ultrascale measure speed` does: one that fails takes no other with it.
    What is measured stays measured: the same command goes on, and one with more values measures those.

    Args:
        run: The run's TOML file.
        steps: How many are timed in each cell.
        warm: How many before them are not.
        processes: Of each cell; what tp, cp and pp leave of them shares the batch (layout.dp).
        minutes: A cell that takes longer is ended.
        out: Folder for cells, table and pictures. Default: `sweeps/NAME` in the folder of the runs.
        list: Measure nothing: write each cell's run, and say what is known so far.
        again: Measure cells that failed once more.
        top: Cells to list.
        json: Print one JSON object; what is being measured goes to stderr.
    """
    return run, steps, warm, processes, minutes, out, list, again, top, json


def command(arguments: list[str]) -> int:
    """Run the verb: 0 if a cell has a result (or nothing was to be measured), 1 if none has, 2 if it is described wrongly."""
    axes, words = split_axes(arguments)
    parsed, rest = parse_with_overrides(sweep, "sweep", words)
    path, steps, warm, processes, minutes, out, only_list, again, top, as_json = parsed
    _check(steps, warm, minutes, top)
    if (world := told_world(os.environ)) > 1:
        rule = f"was started {world} times, by torchrun or the like, and each would measure every cell"
        raise SpecError([Problem("sweep", rule, "Start it once, with --processes; or --list, then a job for each cell.")])
    found, same = cells(path, axes, rest, processes=processes)
    folder = out or _default_folder(found)
    places = [place_of(folder, cell, axes, steps=steps, warm=warm) for cell in found if cell.run is not None]
    _prepare(folder, places, again=again)
    _tell_start(folder, found, places, same, as_json=as_json)
    if not only_list:
        with _ended_in_order():
            tell = _Progress(len(places), sys.stderr if as_json else sys.stdout)
            measure_cells(places, steps=steps, warm=warm, limit_seconds=60 * minutes, done=tell)
    measured = fastest_first(places)
    held = hold(measured)
    write_rows(folder / "results.csv", places)
    pictures = _draw(folder, axes, found, places, measured)
    if as_json:
        print(jsonlib.dumps(_as_json(found, places, measured, held, pictures), indent=1))
    else:
        _show(axes, found, places, measured, held, [folder / "results.csv", *pictures], top)
    return 0 if measured or only_list else 1


def _check(steps: int, warm: int, minutes: float, top: int) -> None:
    wrong = [
        Problem(flag, f"must be at least {least}, is {value}", f"Such as {usual}.")
        for flag, value, least, usual in (("--steps", steps, 1, TIMED), ("--warm", warm, 1, WARM), ("--top", top, 0, 20))
        if value < least
    ]
    if not 0 < minutes < float("inf"):
        wrong.append(Problem("--minutes", f"must be a positive number, is {minutes}", "Such as 10."))
    if wrong:
        raise SpecError(wrong)


def _default_folder(found: Sequence[Cell]) -> Path:
    run = next(cell.run for cell in found if cell.run is not None)
    return Path(run.folder) / "sweeps" / run.name


def _prepare(folder: Path, places: Sequence[Place], *, again: bool) -> None:
    """Every cell's run on disk, for whoever measures it."""
    if folder.exists() and not folder.is_dir():
        raise SpecError([Problem("--out", f"{folder} is a file", "Name a folder, new or of an earlier sweep.")])
    folder.mkdir(parents=True, exist_ok=True)
    for place in places:
        if place.result is None and (again or place.failure is None):
            place.prepare()


def _tell_start(folder: Path, found: Sequence[Cell], places: Sequence[Place], same: int, *, as_json: bool) -> None:
    known = sum(place.result is not None for place in places)
    parts = [f"{len(found)} cells", f"{len(found) - len(places)} refused", f"{known} measured before"]
    parts += [f"{same} left out, the same run as another"] * bool(same)
    print(f"{', '.join(parts)}; in {folder}", file=sys.stderr if as_json else sys.stdout, flush=True)


class _Progress:
    """A line for every cell, as it is done."""

    def __init__(self, count: int, stream: Any):
        self._count, self._stream, self._done = count, stream, 0

    def __call__(self, place: Place) -> None:
        self._done += 1
        one, failure = Measured.of(place), place.failure
        came = "another command is at it" if failure is None else f"{failure.outcome}: {failure.text}"
        if one is not None:
            came = f"{format_seconds(one.step_seconds)} a step, {one.tokens_per_second_per_rank:,.0f} tokens/s a rank"
        print(f"[{self._done}/{self._count}] {words_of(place.cell)}: {came}", file=self._stream, flush=True)


def words_of(cell: Cell) -> str:
    """Its values, in words."""
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


def _draw(folder: Path, axes: Sequence[Axis], found: Sequence[Cell], places: Sequence[Place], measured: Sequence[Measured]):
    if find_spec("matplotlib") is None:
        return []
    from ultrascale.sweep.pictures import draw

    return draw(folder, axes, found, places, measured)


def _as_json(
    found: Sequence[Cell], places: Sequence[Place], measured: Sequence[Measured], held: Held, pictures: Sequence[Path]
) -> dict[str, Any]:
    failed = [(place, place.failure) for place in places if place.result is None and place.failure is not None]
    return {
        "measured": [{"values": one.place.cell.values, "run": str(one.place.run_file)} | one.told for one in measured],
        "failed": [
            {"values": place.cell.values, "run": str(place.run_file)} | asdict(failure) for place, failure in failed if failure
        ],
        "refused": [
            {"values": cell.values, "problems": [asdict(one) for one in cell.problems]} for cell in found if not cell.run
        ],
        "held": asdict(held),
        "pictures": [str(picture) for picture in pictures],
    }


def _show(
    axes: Sequence[Axis], found: Sequence[Cell], places: Sequence[Place], measured: Sequence[Measured], held: Held,
    files: Sequence[Path], top: int,
) -> None:  # fmt: skip
    from rich.console import Console

    console = Console(highlight=False)
    if measured and top:
        console.print()
        console.print(_table(axes, measured[:top]))
        if len(measured) > top:
            console.print(f"and {len(measured) - top:,} slower ones; --top lists more")
    for line in (*_held_lines(held), *_failure_lines(found, places)):
        console.print(line, soft_wrap=True, markup=False)
    console.print("\nfiles")
    for file in files:
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
    """How far off the plan was."""
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
    """What failed, and what was refused, by reason."""
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
