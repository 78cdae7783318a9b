"""`ultrascale check`: prove that a layout computes what one process computes."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ultrascale.cli.parse import parse_with_overrides
from ultrascale.spec.huggingface import to_hf
from ultrascale.spec.layout import Layout
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve
from ultrascale.spec.run import Run
from ultrascale.spec.trainable import expect_trainable
from ultrascale.spec.units import count_of

if TYPE_CHECKING:  # imports torch
    from ultrascale.check.case import Case
    from ultrascale.check.compare import Verdict

QUANTITIES = ("loss", "gradient norm", "gradient", "weight", "moment", "experts")
LARGEST_PROCESSES = 64
"""More on one machine is a slip of the finger."""
NOT_SEEN: dict[str | None, list[str]] = {
    None: [
        "what the reference shares with the trainer: the decoder's formulas, the table of weight decay, the learning rate "
        "(for these three: --against transformers) and the initial values",
        "anything below float64 (bf16, fp8)", "the reading of data",
    ],
    "transformers": ["the initial values", "the names and shapes of export and import", "anything below float64 (bf16, fp8)",
                     "the reading of data", "dropout and losses that balance experts"],
}  # fmt: skip
"""By the reference (None: the program's own) what a proof is blind to by construction."""
MANY_PROCESSES = 8
"""Of more, a proof takes minutes on a small machine, and says how long."""


@dataclass(frozen=True)
class Asked:
    """The words of the command."""

    run: str | None
    processes: int | None
    own_layout: bool
    plant: str | None
    matrix: bool
    markdown: str | None
    against: Literal["transformers"] | None
    steps: int
    json: bool


def check(
    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")] = None,
    /,
    processes: int | None = None,
    own_layout: bool = False,
    plant: str | None = None,
    matrix: bool = False,
    markdown: str | None = None,
    against: Literal["transformers"] | None = None,
    steps: int = 3,
    json: bool = False,
) -> Asked:
    """Prove that N processes compute what one does: loss, gradient norm, every gradient, weights and moments, in float64.

    For example:

        ultrascale check run.toml --processes 2
        ultrascale check --matrix --processes 4

    The run's own axes (data, tensor, context, pipeline, experts) are proven at two ranks each, as many as fit into 8 processes;
    its schedule, stages, context method and recomputation are kept. Every ZeRO stage is proven, with and without accumulation,
    the embedding tied and untied. The run's own data is not needed: sequences are made up, of documents of very uneven length.
    A model too large for a laptop is made small first, keeping its kind. Exit code 0: proven; 1: not.

    Args:
        run: The run's TOML file, or the folder of a run.
        processes: Number of processes. Default: the run's own up to 8, else the least that has its axes. With --matrix: the
            most of any combination; default 8.
        own_layout: Prove only the run's own ZeRO stage and embedding.
        plant: Plant a fault that the proof must see, or `all` that the run can have; `list` names them. Exit code 0 then means
            that each was seen. Without a run each is planted where it can be seen best.
        matrix: Prove the combinations of axes, schedules, methods, families and experts that `docs/support.md` lists.
        markdown: With --matrix: write the tables into this file.
        against: Compare with a plain training loop around transformers' model instead: loss, gradient norm and weights. It
            shares only the initial weights, so it sees what the program's own reference cannot: a wrong formula, decay or
            learning rate.
        steps: Optimizer steps that are compared.
        json: Print the verdicts as JSON.
    """
    return Asked(run, processes, own_layout, plant, matrix, markdown, against, steps, json)


def command(arguments: list[str]) -> int:
    """Run the verb; 0 when everything is proven (or every planted fault was seen)."""
    asked, rest = parse_with_overrides(check, "check", arguments)
    _expect_numbers(asked, rest)
    if asked.matrix:
        from ultrascale.cli.check_matrix import prove_matrix

        return prove_matrix(asked.processes, asked.steps, markdown=asked.markdown, as_json=asked.json)
    if asked.run is None or asked.plant == "list":
        from ultrascale.cli.check_matrix import list_faults, plant_at_home

        return list_faults() if asked.plant == "list" else plant_at_home(asked.plant, asked.steps, as_json=asked.json)
    described = resolve(asked.run, rest).run
    expect_trainable(described.model, described.layout)
    from ultrascale.check.faults import with_faults
    from ultrascale.check.prove import cases, prove_all

    changes, proven, tolerance = [], described, None
    if asked.against is not None:
        from ultrascale.check.transformers_loop import comparable, tolerance_of

        proven, changes = comparable(described, asked.steps)
        tolerance = tolerance_of(proven)
    todo = list(cases(proven, own_layout=asked.own_layout, processes=asked.processes))
    if asked.against is not None:
        for model in {case.run.model for case in todo}:
            to_hf(model)  # raises SpecError here, where it is told, and not on a rank
    steps = asked.steps
    if asked.plant is not None:
        todo, steps = with_faults(todo, asked.plant), max(2, asked.steps)  # some show only in what the first step left
    notes = _notes(described, [case.run.layout for case in todo], asked.processes)
    for note in [*notes, *changes, *_changed_model(todo[0].run, described)]:
        print(note, file=sys.stderr if asked.json else sys.stdout, flush=True)
    options: dict[str, Any] = {} if asked.against is None else {"against": asked.against, "tolerance": tolerance}
    verdicts = prove_all(todo, steps=steps, go_on=asked.plant is not None, on_verdict=_progress(todo), **options)
    good = [verdict.holds == (asked.plant is None) for verdict in verdicts]
    if asked.json:
        not_seen = NOT_SEEN[asked.against]
        print(json_module.dumps([verdict.to_json() | {"not_seen": not_seen} for verdict in verdicts], indent=1))
    else:
        print_verdicts(verdicts, planted=asked.plant is not None, against=asked.against)
    return 0 if all(good) else 1


def _progress(todo: list[Case]) -> Callable[[Verdict], None] | None:
    """How far the proof is, on stderr; of many processes, which take seconds a case, also where no terminal watches."""
    from ultrascale.cli.check_matrix import progress

    most = max(case.run.layout.world_size for case in todo)
    if most > MANY_PROCESSES:
        cores = count_of(os.cpu_count() or 1, "core")
        told = f"{count_of(len(todo), 'case')} on {most} processes, which share {cores}; --processes 2 or 4 take seconds."
        print(told, file=sys.stderr, flush=True)
    return progress(len(todo), lines=most > MANY_PROCESSES)


def _expect_numbers(asked: Asked, rest: list[str]) -> None:
    processes, problems = asked.processes, []
    if processes is not None and not 1 <= processes <= LARGEST_PROCESSES:
        rule = f"must be from 1 to {LARGEST_PROCESSES}, is {processes}"
        problems.append(Problem("--processes", rule, "2 prove communication, 4 also groups of ranks."))
    if processes is not None and "--layout.dp" in [word.partition("=")[0] for word in rest]:
        rule = "is given beside --layout.dp: they say the same thing twice"
        problems.append(Problem("--processes", rule, "Keep one of the two."))
    if asked.steps < 1:
        problems.append(Problem("--steps", f"must be at least 1, is {asked.steps}", "3 is enough to see moments at work."))
    if asked.run is None and not asked.matrix and asked.plant is None:
        problems.append(Problem("RUN.TOML", "is missing", "Name a run, or prove all combinations: --matrix."))
    if asked.matrix and (asked.run is not None or asked.plant is not None or rest):
        odd = asked.run or ("--plant" if asked.plant else rest[0])
        problems.append(Problem("--matrix", f"proves runs of its own, but {odd} is given", "Keep one of the two."))
    elif asked.run is None and rest:
        problems.append(Problem(rest[0], "is a setting of a run, but no run is named", "Name one."))
    if asked.against is not None and (asked.run is None or asked.plant is not None):
        odd = ", which is not named" if asked.run is None else " without planted faults, but --plant is given"
        remedy = "Name one." if asked.run is None else "Keep one of the two."
        problems.append(Problem("--against", f"compares a run{odd}", remedy))
    if asked.markdown is not None and not asked.matrix:
        problems.append(Problem("--markdown", "writes the tables of --matrix, which is not given", "Add --matrix."))
    if problems:
        raise SpecError(problems)


def _notes(described: Run, layouts: list[Layout], processes: int | None) -> list[str]:
    """What the proof does otherwise than the run, in a line each."""
    from ultrascale.check.small import left_out

    own, proven = described.layout, sorted({layout.world_size for layout in layouts})
    notes = []
    if proven == [1]:
        notes.append("One process communicates with nobody: this proves accumulation alone. --processes 2 proves both.")
    elif own.world_size == 1:
        notes.append(f"The run has one process, which communicates with nobody; it is proven with {proven[0]}.")
    elif proven != [own.world_size]:
        notes.append(f"The run's {own.world_size} processes are proven with {' and '.join(map(str, proven))}.")
    shards = {one.dp_shard for one in layouts if one.zero_stage == own.zero_stage and one.dp_shard is not None}
    if own.dp_shard not in (None, own.dp, *shards) and shards:
        notes.append(f"Its groups of {own.dp_shard} ranks with one copy of the state become groups of {max(shards)}.")
    if missing := left_out(own, layouts):
        told = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        notes.append(f"With so few processes {told} not proven" + (": leave --processes out." if processes else "."))
    return notes


def _changed_model(proven: Run, asked: Run) -> list[str]:
    """What stands for the run's model, if that is too large or would leave something out."""
    name, length = asked.model.name or "the model", proven.batch.sequence_length
    notes = []
    if proven.model.hidden_size != asked.model.hidden_size or proven.model.vocab_size != asked.model.vocab_size:
        small = f"{proven.model.num_hidden_layers} layers, hidden {proven.model.hidden_size}"
        notes.append(f"{name} is proven on the same kind of model made small: {small}.")
    if proven.model.sliding_window != asked.model.sliding_window:
        windows = f"{asked.model.sliding_window} tokens are proven as windows of {proven.model.sliding_window}"
        notes.append(f"Its windows of {windows}, which act in sequences of {length}.")
    return notes


def print_verdicts(verdicts: list[Verdict], *, planted: bool, against: str | None = None) -> None:
    """The table of verdicts, what differs, the sum, and what such a proof does not see."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    quantities = [q for q in QUANTITIES if any(q in verdict.worst for verdict in verdicts)]
    table = Table(title=f"float64, tolerance {verdicts[0].tolerance:.0e}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("case")
    for quantity in quantities:
        table.add_column(quantity, justify="right")
    table.add_column("")
    for verdict in verdicts:
        errors = [f"{verdict.worst[q].error:.0e}" if q in verdict.worst else "" for q in quantities]
        words = ("[yellow]MISSED[/]", "[green]seen[/]") if planted else ("[green]equal[/]", "[red]DIFFERS[/]")
        table.add_row(verdict.case, *errors, words[0] if verdict.holds else words[1])
    console.print(table)
    for verdict in verdicts:
        for difference in _told(verdict):
            console.print(f"  {verdict.case}: {difference}", soft_wrap=True)
    held = sum(verdict.holds for verdict in verdicts)
    if planted:
        console.print(f"\n{len(verdicts) - held} of {len(verdicts)} planted faults were seen.")
    else:
        compute = "computes" if len(verdicts) == 1 else "compute"
        what = "one process" if against is None else f"a plain loop of {against}"
        console.print(f"\n{held} of {count_of(len(verdicts), 'case')} {compute} what {what} computes.")
        console.print(f"Not seen: {'; '.join(NOT_SEEN[against])}.", soft_wrap=True)


def _told(verdict: Verdict) -> list[str]:
    if verdict.failure:
        return [verdict.failure.splitlines()[-1]]
    # A message not waited for explains a wrong gradient, and that the weights and moments that follow from it.
    first = [d for kind in ("messages", "gradient") for d in verdict.beyond if d.quantity == kind] or list(verdict.beyond)
    rest = len(verdict.beyond) - min(3, len(first))
    return [str(difference) for difference in first[:3]] + ([f"and {rest} more"] if rest > 0 else [])
