"""`ultrascale check` as a function: proves that a layout computes what one process computes, and detects planted faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ultrascale.api.displays import Rows, TableRow, bars, html
from ultrascale.api.extras import naming_extras
from ultrascale.api.keywords import VerbRequest, read_keywords
from ultrascale.api.planning.plan_request import SHORT
from ultrascale.api.planning.run_of import ModelAndMachines, planned_run
from ultrascale.api.stamp import stamped
from ultrascale.check.cases import cases, smallest_run_of, with_faults
from ultrascale.check.faults.table import FAULTS, expect_known
from ultrascale.check.small import Case, small_layouts
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.huggingface import to_hf
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, expect_none, mistake
from ultrascale.description.run import Run, run_of_island
from ultrascale.description.units import count_of
from ultrascale.output_file import write_output

if TYPE_CHECKING:  # imports torch
    from ultrascale.check.compare import Verdict
    from ultrascale.check.matrix import CellOutcome

Progress = Callable[[int, int], "Callable[[Verdict], None] | None"]
"""Called with the number of cases and the largest number of processes; returns the function that takes each verdict, in the
process of rank 0."""

LARGEST_PROCESSES = 64
"""A larger number of processes on one machine is a typing error."""
NOT_COVERED: dict[str | None, list[str]] = {
    None: [
        "what the reference shares with the trainer: the decoder's formulas, the table of weight decay, the learning rate "
        "(for these three: --against transformers) and the initial values",
        "anything below float64 (bf16, fp8)", "the reading of data",
    ],
    "transformers": ["the initial values", "the names and shapes of export and import", "anything below float64 (bf16, fp8)",
                     "the reading of data", "dropout and losses that balance experts"],
}  # fmt: skip
"""Blind spots of a proof by construction, by reference (None: the program's own)."""


@dataclass(frozen=True)
class CheckOptions:
    """Prove that N processes compute what one does: loss, gradient norm, every gradient, weights and moments, in float64.

    For example:

        ultrascale check run.toml --processes 2
        ultrascale check --model llama-3-8b --gpus 64xh100
        ultrascale check --matrix --processes 4

    Each axis of the run (data, tensor, context, pipeline, experts) is proven at two ranks, as many axes as fit into 8
    processes; the schedule, stages, context-parallel method and recomputation are the run's. Every ZeRO stage is proven, with
    and without gradient accumulation, with tied and untied embeddings. The run's data is not needed: sequences are generated,
    with documents of very uneven length. A model too large for a laptop is first scaled down to a small one of the same
    architecture. Exit code 0: proven; 1: not.
    """

    run: str | None = None
    """TOML file of the run, or the folder of a run."""
    model: str | None = None
    """Model in place of a file, as for `ultrascale plan`: checks the best layout of this model..."""
    gpus: str | None = None
    """... on these machines, such as 64xh100. Give degrees as for `plan`: --tp 8 --zero-stage 3."""
    seq_len: int | None = None
    """Sequence length in tokens, such as 8192 or 128k; with --model."""
    tokens_per_batch: str | None = None
    """Global batch in tokens, such as 4M; with --model."""
    processes: int | None = None
    """Processes. Default: the run's, up to 8, else the fewest with its axes. --matrix: most of any combination; default 8."""
    own_layout: bool = False
    """Prove only the run's own ZeRO stage and embedding (tied or untied)."""
    plant: str | None = None
    """Plant a fault that the proof must detect, or `all` that apply to the run; `list` names them. Exit code 0 then means that
    each was detected. Without a run, each is planted where it is easiest to detect."""
    matrix: bool = False
    """Prove the combinations of axes, schedules, methods, model families and experts that `docs/support.md` lists."""
    markdown: str | None = None
    """Write the tables to this file; with --matrix."""
    against: Literal["transformers"] | None = None
    """Compare with a plain training loop around the model in transformers instead: loss, gradient norm and weights. It shares
    only the initial weights, so it detects what the program's own reference cannot: a wrong formula, weight decay or learning
    rate."""
    steps: int = 3
    """Optimizer steps to compare."""
    json: bool = False
    """Print the verdicts as JSON."""


@dataclass(frozen=True, repr=False)
class Check(Rows):
    """Verdicts of a proof, or of a proof that had to detect planted faults."""

    verdicts: tuple[Verdict, ...]
    planted: bool
    """True if faults were planted: a case is then good if it differs."""
    against: Literal["transformers"] | None
    is_of_run: bool
    """True unless a fault was planted in a run of its own."""
    notes: tuple[str, ...] = ()
    """Notes on what differs from the run's configuration."""

    @property
    def holds(self) -> bool:
        """True if everything is proven, or if every planted fault was detected."""
        return all(verdict.holds != self.planted for verdict in self.verdicts)

    def to_dict(self) -> list[dict[str, Any]]:
        """The output of `ultrascale check --json`: one object per verdict."""
        blind = {"not_seen": NOT_COVERED[self.against]} if self.is_of_run else {}
        return [stamped("check", verdict.to_json() | blind) for verdict in self.verdicts]

    def rows(self) -> list[TableRow]:
        """One row per case: the largest relative error of each quantity, and whether the case holds."""
        return [
            {"case": verdict.case, "holds": verdict.holds, **{name: worst.error for name, worst in verdict.worst.items()}}
            for verdict in self.verdicts
        ]

    def plot(self) -> Any:
        """A matplotlib figure of the largest relative error of each case. Raises NotInstalledError without matplotlib."""
        errors = [
            (verdict.case, max((worst.error for worst in verdict.worst.values()), default=0.0)) for verdict in self.verdicts
        ]
        allowed = max((verdict.tolerance for verdict in self.verdicts), default=0.0)
        return bars(repr(self), errors, label="largest relative error", linear_to=allowed if self.planted else None)

    def __repr__(self) -> str:
        num_held, count = sum(verdict.holds for verdict in self.verdicts), len(self.verdicts)
        seen, equal = f"{count - num_held} of {count} planted faults seen", f"{num_held} of {count_of(count, 'case')} equal"
        return f"Check({seen if self.planted else equal})"

    def _repr_html_(self) -> str:
        rows = self.rows()
        columns = list(dict.fromkeys(name for row in rows for name in row))
        words = [{name: _error(row.get(name, "")) for name in columns} for row in rows]
        return html(repr(self), words)


@dataclass(frozen=True, repr=False)
class CheckMatrix(Rows):
    """Result of every combination of axes, schedules, methods, families and experts."""

    outcomes: tuple[CellOutcome, ...]
    steps: int
    processes: int

    @property
    def wrong(self) -> tuple[CellOutcome, ...]:
        """Combinations with a wrong result."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == "DIFFERS")

    @property
    def holds(self) -> bool:
        """True if no combination differs."""
        return not self.wrong

    @property
    def states(self) -> list[tuple[str, int]]:
        """Number of combinations that are proven, refused, untried, or differ."""
        return Counter(outcome.state for outcome in self.outcomes).most_common()

    def to_dict(self) -> list[dict[str, Any]]:
        """The output of `ultrascale check --matrix --json`: one object per combination."""
        return [
            stamped("check-matrix", {"name": outcome.cell.name, "state": outcome.state, "reason": outcome.cell.refused,
                                     "verdict": outcome.verdict and outcome.verdict.to_json()}) for outcome in self.outcomes
        ]  # fmt: skip

    def rows(self) -> list[TableRow]:
        """One row per combination."""
        return [
            {"name": outcome.cell.name, "state": outcome.state, "reason": outcome.cell.refused} for outcome in self.outcomes
        ]

    def plot(self) -> Any:
        """A matplotlib figure: number of combinations in each state. Raises NotInstalledError without matplotlib."""
        return bars(repr(self), self.states, label="combinations")

    def __repr__(self) -> str:
        return f"CheckMatrix({', '.join(f'{number} {state}' for state, number in self.states)})"


def check(run: str | PathLike[str] | None = None, **settings: Any) -> Check | CheckMatrix:
    """Prove that a run on N processes computes what one process computes: `check("run.toml", processes=2)`, or
    `check(matrix=True)` for all combinations.

    `settings` are the flags of `ultrascale check` by name, and settings of the run. Starts processes; needs torch. Raises
    SpecError if an argument or the run is invalid.
    """
    request = read_keywords(CheckOptions, "check", {"run": run, **settings}, positional=("run",), short=SHORT)
    with naming_extras("check"):
        return answer(request)


def answer(
    request: VerbRequest[CheckOptions],
    *,
    report: Callable[[str], None] = lambda note: None,
    progress: Progress = lambda count, most: None,
) -> Check | CheckMatrix:
    """Run the requested proof. `report` is called beforehand with each difference between the proof and the run."""
    options, settings = request.options, list(request.settings)
    expect_numbers(options, settings)
    if options.plant not in (None, "list"):
        expect_known(options.plant)
    if options.matrix:
        return _matrix(options, progress)
    description = ModelAndMachines.of(options)
    if (options.run is None and not description.is_given) or options.plant == "list":
        return _planted_faults(options, progress)
    described = (
        planned_run(description, settings, run=options.run, verb="check")
        if description.is_given
        else resolve(options.run, settings).run
    )
    expect_trainable(described.model, described.layout)
    islands, described = described.islands.count, run_of_island(described)
    if options.plant is not None and all(
        layout.world_size < 2 for layout in small_layouts(described.layout, options.processes)
    ):
        raise mistake("--plant", "these are faults between processes, and there is one", "Add --processes 2.")
    if options.against is not None and find_spec(options.against) is None:
        remedy = "pip install transformers, or leave --against out."
        raise mistake("--against", "needs transformers, which is not installed", remedy)
    changes, proven, tolerance = [], described, None
    if options.against is not None:
        from ultrascale.check.oracle.transformers_loop import comparable, tolerance_of

        proven, changes = comparable(described, options.steps)
        tolerance = tolerance_of(proven)
    todo = list(cases(proven, own_layout=options.own_layout, processes=options.processes))
    if options.against is not None:
        for model in {case.run.model for case in todo}:
            to_hf(model)  # raises SpecError here, where it is reported, and not on a rank
    steps = options.steps
    if options.plant is not None:
        todo, steps = with_faults(todo, options.plant), max(2, options.steps)  # some show only in what the first step left
    notes = _notes(described, [case.run.layout for case in todo], options.processes)
    if islands > 1:
        notes.append(f"One of {islands} islands is proven, with its share of the batch; outer steps are not part of a proof.")
    notes = [*notes, *changes, *_changed_model(todo[0].run, described)]
    for note in notes:
        report(note)
    against: dict[str, Any] = {} if options.against is None else {"against": options.against, "tolerance": tolerance}
    planted = options.plant is not None
    from ultrascale.check.prove import prove_all

    on_verdict = progress(len(todo), max(case.run.layout.world_size for case in todo))
    verdicts = prove_all(todo, steps=steps, go_on=planted, on_verdict=on_verdict, **against)
    return Check(tuple(verdicts), planted, options.against, is_of_run=True, notes=tuple(notes))


def _matrix(options: CheckOptions, progress: Progress) -> CheckMatrix:
    """Prove every combination of at most that many processes, and write the requested tables."""
    from ultrascale.check.matrix import cells, prove_cells
    from ultrascale.check.small import MOST_PROCESSES
    from ultrascale.check.support import to_markdown

    most, todo = options.processes or MOST_PROCESSES, cells()
    count = sum(not cell.refused and cell.run.layout.world_size <= most for cell in todo)
    outcomes = prove_cells(todo, processes=most, steps=options.steps, on_verdict=progress(count, 0))
    if options.markdown is not None:
        write_output(options.markdown, to_markdown(outcomes, options.steps, most))
    return CheckMatrix(tuple(outcomes), options.steps, most)


def _planted_faults(options: CheckOptions, progress: Progress) -> Check:
    """Plant a fault, or `all`, each in the smallest run in which it can be detected."""
    from ultrascale.check.prove import prove_all

    name = options.plant
    assert name is not None
    names = list(FAULTS) if name == "all" else [name]
    todo = [Case(fault, smallest_run_of(fault), fault) for fault in names]
    verdicts = prove_all(todo, steps=max(2, options.steps), go_on=True, on_verdict=progress(len(todo), 0))
    return Check(tuple(verdicts), True, None, is_of_run=False)


def expect_numbers(options: CheckOptions, settings: list[str]) -> None:
    """Raises SpecError with every mistake in the command."""
    processes, problems = options.processes, []
    if processes is not None and not 1 <= processes <= LARGEST_PROCESSES:
        rule = f"must be from 1 to {LARGEST_PROCESSES}, is {processes}"
        problems.append(Problem("--processes", rule, "2 prove communication, 4 also groups of ranks."))
    if processes is not None and "--layout.dp" in [word.partition("=")[0] for word in settings]:
        rule = "is given beside --layout.dp: they say the same thing twice"
        problems.append(Problem("--processes", rule, "Keep one of the two."))
    if options.steps < 1:
        problems.append(Problem("--steps", f"must be at least 1, is {options.steps}", "3 is enough to see moments at work."))
    described = options.run is not None or options.model is not None or options.gpus is not None
    if not described and not options.matrix and options.plant is None:
        problems.append(Problem("RUN.TOML", "is missing", "Name a run, give --model and --gpus, or prove all: --matrix."))
    if options.matrix and (described or options.plant is not None or settings):
        conflict = options.run or options.model or options.gpus or ("--plant" if options.plant else settings[0])
        problems.append(Problem("--matrix", f"proves runs of its own, but {conflict} is given", "Keep one of the two."))
    elif not described and settings:
        problems.append(Problem(settings[0], "is a setting of a run, but no run is named", "Name one."))
    if options.against is not None and (not described or options.plant is not None):
        conflict = " without planted faults, but --plant is given" if described else ", which is not named"
        remedy = "Keep one of the two." if described else "Name one."
        problems.append(Problem("--against", f"compares a run{conflict}", remedy))
    if options.markdown is not None and not options.matrix:
        problems.append(Problem("--markdown", "writes the tables of --matrix, which is not given", "Add --matrix."))
    elif options.markdown is not None and not Path(options.markdown).absolute().parent.is_dir():
        problems.append(Problem("--markdown", f"{options.markdown} is in no folder that there is", "Make the folder first."))
    expect_none(problems)


def _notes(described: Run, layouts: list[Layout], processes: int | None) -> list[str]:
    """Lines on the differences between the proof and the run."""
    from ultrascale.check.small import left_out

    run_layout, proven = described.layout, sorted({layout.world_size for layout in layouts})
    notes = []
    if proven == [1]:
        notes.append("One process communicates with nobody: this proves accumulation alone. --processes 2 proves both.")
    elif run_layout.world_size == 1:
        notes.append(f"The run has one process, which communicates with nobody; it is proven with {proven[0]}.")
    elif proven != [run_layout.world_size]:
        notes.append(f"The run's {run_layout.world_size} processes are proven with {' and '.join(map(str, proven))}.")
    shards = {
        layout.dp_shard for layout in layouts if layout.zero_stage == run_layout.zero_stage and layout.dp_shard is not None
    }
    if run_layout.dp_shard not in (None, run_layout.dp, *shards) and shards:
        notes.append(f"Its groups of {run_layout.dp_shard} ranks with one copy of the state become groups of {max(shards)}.")
    if missing := left_out(run_layout, layouts):
        not_proven = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        notes.append(f"With so few processes {not_proven} not proven" + (": leave --processes out." if processes else "."))
    return notes


def _changed_model(proven: Run, run: Run) -> list[str]:
    """Changes to the run's model, if it is too large or would leave a feature untested."""
    name, length = run.model.name or "the model", proven.batch.sequence_length
    notes = []
    if proven.model.hidden_size != run.model.hidden_size or proven.model.vocab_size != run.model.vocab_size:
        small = f"{proven.model.num_hidden_layers} layers, hidden {proven.model.hidden_size}"
        notes.append(f"{name} is checked on a scaled-down model of the same architecture: {small}.")
    if proven.model.sliding_window != run.model.sliding_window:
        windows = f"{run.model.sliding_window} tokens are proven as windows of {proven.model.sliding_window}"
        notes.append(f"Its windows of {windows}, which act in sequences of {length}.")
    return notes


def _error(value: Any) -> Any:
    return f"{value:.0e}" if isinstance(value, float) else value
