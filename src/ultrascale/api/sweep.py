"""`ultrascale sweep` as a function: measures many layouts of a run here, and compares each with the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from ultrascale.api.displays import Rows, TableRow, figure, html
from ultrascale.api.extras import naming_extras
from ultrascale.api.keywords import read_keywords
from ultrascale.api.stamp import stamped
from ultrascale.config.rules.early import expect_processes
from ultrascale.data.files import DataError
from ultrascale.description.problems import Problem, SpecError, expect_none, mistake
from ultrascale.description.rank_environment import env_world_size
from ultrascale.description.units import format_bytes, format_seconds, format_share
from ultrascale.page.documents import sweep_document
from ultrascale.page.html_file import expect_writable, write_document
from ultrascale.storage import Store, open_store
from ultrascale.storage.location import url_problem
from ultrascale.sweep.accuracy import Held, MeasuredCell, fastest_first, plan_accuracy
from ultrascale.sweep.cells import TIMED, WARM, CellPlace, place_of
from ultrascale.sweep.grid import Axis, SweepCell, cells, split_axes
from ultrascale.sweep.measured import measure_cells
from ultrascale.sweep.rows import write_rows
from ultrascale.sweep.shared import SharedCells
from ultrascale.train.corpora import expect_startable

STORE_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class SweepOptions:
    """Measure every combination of settings that have several values, and report the error of the plan.

    Any setting can have several values, separated by commas (`ultrascale show keys` lists settings):

        ultrascale sweep run.toml --layout.zero-stage 0,1,2,3 --layout.micro-batch-size 1,2
        ultrascale sweep run.toml --processes 4 --layout.tp 1,2,4 --layout.pp 1,2

    Each cell runs in a process of its own, as `ultrascale measure speed` does; a cell that fails does not end the others.
    Measurements are kept: the same command resumes the sweep, and with more values measures only the new cells.
    """

    run: str
    """TOML file of the run."""
    steps: int = TIMED
    """Timed steps in each cell."""
    warm: int = WARM
    """Warm-up steps before the timed ones."""
    processes: int | None = None
    """Processes per cell; dp = processes / (tp x cp x pp) (layout.dp)."""
    minutes: float = 10.0
    """Time limit of a cell in minutes; a longer one is ended."""
    out: Path | None = None
    """Folder for cells, table and pictures. Default: `sweeps/NAME` in the folder of runs."""
    store: str | None = None
    """Bucket or folder that shares results with other machines, such as s3://BUCKET/sweeps/NAME."""
    list: bool = False
    """Measure nothing: write the run of each cell, and print the results so far."""
    again: bool = False
    """Measure failed cells again."""
    top: int = 20
    """Number of cells to list."""
    html: Path | None = None
    """Write the results with charts to one self-contained HTML file."""
    json: bool = False
    """Print one JSON object; progress goes to stderr."""


@dataclass(frozen=True)
class SweepGrid:
    """A sweep before measurement."""

    folder: Path
    cells: tuple[SweepCell, ...]
    places: tuple[CellPlace, ...]
    """Locations of the cells that can run."""
    num_duplicates: int
    """Cells left out because their run equals another's."""


@dataclass(frozen=True, repr=False)
class Sweep(Rows):
    """Measurements of a sweep so far, and the error of the plan."""

    grid: SweepGrid
    axes: tuple[Axis, ...]
    measured: tuple[MeasuredCell, ...]
    """Measured cells, fastest first."""
    held: Held
    """Comparison of the plan with the measurements."""
    pictures: tuple[Path, ...]

    @property
    def table(self) -> Path:
        """CSV file of the measurements, which `ultrascale validate` reads."""
        return self.grid.folder / "results.csv"

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale sweep --json`."""
        places = self.grid.places
        failed = [(place, place.failure) for place in places if place.result is None and place.failure is not None]
        document = {
            "measured": [_named(cell.place) | cell.result for cell in self.measured],
            "failed": [_named(place) | asdict(failure) for place, failure in failed if failure],
            "refused": [
                {"values": cell.values, "problems": [asdict(problem) for problem in cell.problems]}
                for cell in self.grid.cells
                if not cell.run
            ],
            "held": asdict(self.held),
            "pictures": [str(picture) for picture in self.pictures],
        }
        return stamped("sweep", document)

    def rows(self) -> list[TableRow]:
        """One row per measured cell: its values, and time and memory, measured and planned."""
        names = ("step_seconds", "planned_step_seconds", "tokens_per_second_per_rank", "mfu", "measured_peak_bytes",
                 "planned_peak_bytes")  # fmt: skip
        return [{**cell.place.cell.values, **{name: getattr(cell, name) for name in names}} for cell in self.measured]

    def plot(self) -> Any:
        """A matplotlib figure: measured against planned memory, one point per cell. Raises NotInstalledError without
        matplotlib."""
        drawing = figure(repr(self))
        axes = drawing.add_subplot()
        pairs = [(cell.planned_peak_bytes, cell.measured_peak_bytes) for cell in self.measured]
        known = [(planned / 2**20, measured / 2**20) for planned, measured in pairs if measured is not None]
        axes.scatter([planned for planned, _ in known], [measured for _, measured in known])
        axes.axline((0, 0), slope=1, linewidth=0.8, color="#22272e")
        axes.set_xlabel("planned, MiB")
        axes.set_ylabel("measured, MiB")
        return drawing

    def __repr__(self) -> str:
        count = f"{len(self.measured)} of {len(self.grid.cells)} cells measured"
        if not self.measured:
            return f"Sweep({count})"
        best = self.measured[0]
        values = ", ".join(f"{key} {value}" for key, value in best.place.cell.values.items()) or "the run itself"
        return f"Sweep({count}; fastest {values}: {format_seconds(best.step_seconds)} a step)"

    def _repr_html_(self) -> str:
        rows = [
            {**cell.place.cell.values, "step": format_seconds(cell.step_seconds), "MFU": format_share(cell.mfu),
             "memory planned": format_bytes(cell.planned_peak_bytes)} for cell in self.measured
        ]  # fmt: skip
        return html(repr(self), rows)


def _named(place: CellPlace) -> dict[str, Any]:
    return {"values": place.cell.values, "run": str(place.run_file)}


def sweep(run: str | PathLike[str], **settings: Any) -> Sweep:
    """Measure every combination of settings with several values on this machine.

    For example: `sweep("run.toml", layout={"zero_stage": [0, 1]})`.

    `settings` are the flags of `ultrascale sweep` by name, and settings of the run. Needs torch and the run's data. Raises
    SpecError if an argument or the run is invalid.
    """
    request = read_keywords(SweepOptions, "sweep", {"run": run, **settings}, positional=("run",))
    axes, fixed_settings = split_axes(request.settings)
    with naming_extras("sweep"):
        return answer(request.options, axes, fixed_settings)


def answer(
    options: SweepOptions,
    axes: Sequence[Axis],
    fixed_settings: Sequence[str],
    *,
    started: Callable[[SweepGrid], None] = lambda grid: None,
    done: Callable[[CellPlace], None] = lambda place: None,
) -> Sweep:
    """Measure the cells without a result, and report all results. `started` is called with the sweep, `done` after each
    cell."""
    _check(options)
    expect_writable(options.html)
    if (world := env_world_size()) > 1:
        rule = f"was started {world} times, by torchrun or the like, and each would measure every cell"
        raise mistake("sweep", rule, "Start it once, with --processes; or --list, then a job for each cell.")
    grid_cells, num_duplicates = cells(options.run, axes, fixed_settings, processes=options.processes)
    run = next(cell.run for cell in grid_cells if cell.run is not None)
    folder = options.out or Path(run.folder) / "sweeps" / run.name
    places = [
        place_of(folder, cell, axes, steps=options.steps, warm=options.warm) for cell in grid_cells if cell.run is not None
    ]
    _prepare(folder, places, again=options.again)
    shared = None if options.store is None else SharedCells(_store(options.store), retries_failures=options.again)
    if shared is not None:
        places = [*shared.fetched(places)]
    grid = SweepGrid(folder, tuple(grid_cells), tuple(places), num_duplicates)
    started(grid)
    if not options.list:
        _measure(places, options, shared, done)
    measured = fastest_first(places)
    scores = plan_accuracy(measured)
    write_rows(folder / "results.csv", places)
    pictures = _draw(grid, axes, measured)
    if shared is not None:
        shared.send_files([folder / "results.csv", *pictures])
    done_so_far = Sweep(grid, tuple(axes), tuple(measured), scores, tuple(pictures))
    if options.html is not None:
        values = [word for axis in axes for word in (f"--{axis.key}", ",".join(axis.values))]
        write_document(options.html, sweep_document(done_so_far.to_dict()), ["sweep", options.run, *values, *fixed_settings])
    return done_so_far


def _check(options: SweepOptions) -> None:
    bounds = (("--steps", options.steps, 1, TIMED), ("--warm", options.warm, 1, WARM), ("--top", options.top, 0, 20))
    problems = [
        Problem(flag, f"must be at least {least}, is {value}", f"Such as {usual}.")
        for flag, value, least, usual in bounds
        if value < least
    ]
    if not 0 < options.minutes < float("inf"):
        problems.append(Problem("--minutes", f"must be a positive number, is {options.minutes}", "Such as 10."))
    expect_none(problems)
    if not options.list:
        expect_processes(options.processes or 1)


def _store(place: str) -> Store:
    if problem := url_problem(place, to_write=True):
        raise mistake("--store", problem, "For example s3://BUCKET/sweeps/NAME, or a folder.")
    return open_store(place, patience_seconds=STORE_PATIENCE_SECONDS, to_write=True)


def _measure(
    places: Sequence[CellPlace], options: SweepOptions, shared: SharedCells | None, done: Callable[[CellPlace], None]
) -> None:
    """Measure cells without a local result, unless the store has one by then."""

    def both(place: CellPlace) -> None:
        if shared is not None:
            shared.send(place)
        done(place)

    if all(place.result is None for place in places):  # else some cells have results to report, and the others fail one by one
        _expect_any_startable([place for place in places if place.failure is None])
    todo = places if shared is None else shared.fetched(places)
    measure_cells(todo, steps=options.steps, warm=options.warm, limit_seconds=60 * options.minutes, done=both)


def _expect_any_startable(places: Sequence[CellPlace]) -> None:
    """Raises the error of the first cell's device or data if every cell would fail at its start."""
    wrong: list[SpecError | DataError] = []
    for place in places:
        try:
            return expect_startable(place.run)
        except (SpecError, DataError) as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]


def _prepare(folder: Path, places: Sequence[CellPlace], *, again: bool) -> None:
    """Write the run of every cell to disk, for the processes that measure it."""
    if folder.exists() and not folder.is_dir():
        raise mistake("--out", f"{folder} is a file", "Name a folder, new or of an earlier sweep.")
    folder.mkdir(parents=True, exist_ok=True)
    for place in places:
        if place.result is None and (again or place.failure is None):
            place.prepare()


def _draw(grid: SweepGrid, axes: Sequence[Axis], measured: Sequence[MeasuredCell]) -> list[Path]:
    if find_spec("matplotlib") is None:
        return []
    from ultrascale.sweep.pictures import draw

    return draw(grid.folder, axes, grid.cells, grid.places, measured)
