"""`ultrascale check`: prove that a layout computes what one process computes."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import tyro

from ultrascale.cli.parse import parse_with_overrides
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve
from ultrascale.spec.run import Run
from ultrascale.spec.trainable import expect_trainable

if TYPE_CHECKING:  # imports torch
    from ultrascale.check.compare import Verdict

QUANTITIES = ("loss", "gradient norm", "gradient", "weight", "moment")
LARGEST_PROCESSES = 64
"""More on one machine is a slip of the finger."""


def check(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")],
    /,
    processes: int | None = None,
    own_layout: bool = False,
    plant: str | None = None,
    steps: int = 3,
    json: bool = False,
) -> tuple[str, int | None, bool, str | None, int, bool]:
    """Prove that N processes compute what one does: loss, gradient norm, every gradient, weights and moments, in float64.

        ultrascale check run.toml --processes 2

    Every ZeRO stage is proven, with and without accumulation, the embedding tied and untied. The run's own data is not needed:
    sequences are made up, of documents of very uneven length. A model too large for a laptop is made small first, keeping its
    kind. Exit code 0: proven; 1: not.

    Args:
        run: The run's TOML file, or the folder of a run.
        processes: Number of processes. Default: the run's layout.dp; 2 if that is 1, and 4 if it is more than 8.
        own_layout: Prove only the run's own ZeRO stage and embedding.
        plant: Plant a fault that the proof must see, or `all` of them: missing-reduce, mean-of-means, counted-twice,
            shifted-batch. Exit code 0 then means that each was seen.
        steps: Optimizer steps that are compared.
        json: Print the verdicts as JSON.
    """
    return run, processes, own_layout, plant, steps, json


def command(arguments: list[str]) -> int:
    """Run the verb; 0 when everything is proven (or every planted fault was seen)."""
    parsed, rest = parse_with_overrides(check, "check", arguments)
    path, processes, own_layout, plant, steps, as_json = parsed
    _expect_numbers(processes, steps, rest)
    described = resolve(path, rest).run
    expect_trainable(described.model, described.layout)
    from ultrascale.check.faults import FAULTS, expect_fault
    from ultrascale.check.prove import cases, prove_all, usual_processes, with_processes

    run = with_processes(described, usual_processes(described) if processes is None else processes)
    todo = list(cases(run, own_layout=own_layout))
    if plant is not None:
        expect_fault(plant, run.layout.dp)
        planted = FAULTS if plant == "all" else (plant,)
        todo = [replace(case, fault=fault, name=f"{fault}: {case.name}") for fault in planted for case in todo]
    for note in _notes(described, run):
        print(note, file=sys.stderr if as_json else sys.stdout, flush=True)
    verdicts = prove_all(todo, steps=steps)
    good = [verdict.holds == (plant is None) for verdict in verdicts]
    if as_json:
        print(json_module.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    else:
        _print(todo[0].run, run, verdicts, planted=plant is not None)
    return 0 if all(good) else 1


def _expect_numbers(processes: int | None, steps: int, rest: list[str]) -> None:
    problems = []
    if processes is not None and not 1 <= processes <= LARGEST_PROCESSES:
        rule = f"must be from 1 to {LARGEST_PROCESSES}, is {processes}"
        problems.append(Problem("--processes", rule, "2 prove communication, 4 also groups of ranks."))
    if processes is not None and "--layout.dp" in [word.partition("=")[0] for word in rest]:
        rule = "is given beside --layout.dp: they say the same thing twice"
        problems.append(Problem("--processes", rule, "Keep one of the two."))
    if steps < 1:
        problems.append(Problem("--steps", f"must be at least 1, is {steps}", "3 is enough to see moments at work."))
    if problems:
        raise SpecError(problems)


def _notes(described: Run, proven: Run) -> list[str]:
    """What the proof does otherwise than the run, in a line each."""
    own, layout = described.layout, proven.layout
    notes = []
    if layout.dp == 1:
        notes.append("One process communicates with nobody: this proves accumulation alone. --processes 2 proves both.")
    elif own.dp == 1:
        notes.append(f"The run has one process, which communicates with nobody; it is proven with {layout.dp}.")
    elif layout.dp != own.dp:
        notes.append(f"The run's {own.dp} processes are proven with {layout.dp}.")
    if own.dp_shard not in (None, own.dp, layout.dp_shard):
        notes.append(f"Its groups of {own.dp_shard} ranks with one copy of the state become groups of {layout.dp_shard}.")
    return notes


def _print(proven: Run, asked: Run, verdicts: list[Verdict], *, planted: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from ultrascale.check.prove import TOLERANCE

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 128)
    if proven.model != asked.model:
        small = f"{proven.model.num_hidden_layers} layers, hidden {proven.model.hidden_size}"
        console.print(f"{asked.model.name or 'the model'} is proven on the same kind of model made small: {small}.\n")
    table = Table(title=f"float64, tolerance {TOLERANCE:.0e}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("case")
    for quantity in QUANTITIES:
        table.add_column(quantity, justify="right")
    table.add_column("")
    for verdict in verdicts:
        errors = [f"{verdict.worst[quantity].error:.0e}" for quantity in QUANTITIES]
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
        console.print(f"\n{held} of {len(verdicts)} cases compute what one process computes.")


def _told(verdict: Verdict) -> list[str]:
    # A wrong gradient explains the weights and moments that follow from it.
    first = [d for d in verdict.beyond if d.quantity == "gradient"] or list(verdict.beyond)
    rest = len(verdict.beyond) - min(3, len(first))
    return [str(difference) for difference in first[:3]] + ([f"and {rest} more"] if rest > 0 else [])
