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

if TYPE_CHECKING:  # imports torch
    from ultrascale.check.compare import Verdict

QUANTITIES = ("loss", "gradient norm", "gradient", "weight", "moment")


def check(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")],
    /,
    processes: int | None = None,
    every_stage: bool = False,
    plant: str | None = None,
    steps: int = 3,
    json: bool = False,
) -> tuple[str, int | None, bool, str | None, int, bool]:
    """Prove that N processes compute what one does: loss, gradient norm, every gradient, weights and moments, in float64.

        ultrascale check run.toml --layout.dp 2 --layout.zero-stage 3

    The run's own data is not needed: sequences are made up, of documents of very uneven length. A model too large for a laptop
    is made small first, keeping its kind. Exit code 0: proven; 1: not.

    Args:
        run: The run's TOML file, or the folder of a run.
        processes: Number of processes (layout.dp).
        every_stage: Also prove the other ZeRO stages, hybrid sharding, and the embedding both tied and untied.
        plant: Plant a fault that the proof must see, or `all` of them: missing-reduce, mean-of-means, counted-twice,
            shifted-batch. Exit code 0 then means that each was seen.
        steps: Optimizer steps that are compared.
        json: Print the verdicts as JSON.
    """
    return run, processes, every_stage, plant, steps, json


def command(arguments: list[str]) -> int:
    """Run the verb; 0 when everything is proven (or every planted fault was seen)."""
    parsed, rest = parse_with_overrides(check, "check", arguments)
    path, processes, every_stage, plant, steps, as_json = parsed
    run = resolve(path, rest if processes is None else [*rest, "--layout.dp", str(processes)]).run
    if steps < 1:
        raise SpecError([Problem("--steps", f"must be at least 1, is {steps}", "3 is enough to see moments at work.")])
    from ultrascale.check.faults import FAULTS, expect_fault
    from ultrascale.check.prove import cases, prove_all

    todo = list(cases(run, every_stage=every_stage))
    if plant is not None:
        expect_fault(plant, run.layout.dp)
        planted = FAULTS if plant == "all" else (plant,)
        todo = [replace(case, fault=fault, name=f"{fault}: {case.name}") for fault in planted for case in todo]
    verdicts = prove_all(todo, steps=steps)
    good = [verdict.holds == (plant is None) for verdict in verdicts]
    if as_json:
        print(json_module.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    else:
        _print(todo[0].run, run, verdicts, planted=plant is not None)
    return 0 if all(good) else 1


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
