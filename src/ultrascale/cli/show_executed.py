"""`ultrascale show schedule NAME --executed`: the step as it was run on this machine, below the step as it was planned."""

from __future__ import annotations

import json as jsonlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ultrascale.spec.layout import PipelineRuntime
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.units import count_of

if TYPE_CHECKING:
    from ultrascale.measure.executed import Both
    from ultrascale.plan.pipeline.play import Program

MOST_RANKS, MOST_PASSES = 16, 2_000
"""Processes that a machine is asked to start, and forward passes of a step, of which four are run: a minute on two cores."""


def show_executed(name: str, program: Program, runtime: PipelineRuntime, *, svg: Path | None, as_json: bool) -> None:
    """Run the schedule with the loop of `runtime` and print both.

    Raises SpecError if it is too much for one machine, or the trainer does not run it.
    """
    _check_size(program)
    from ultrascale.measure.executed import execute_schedule

    both = execute_schedule(name, program, runtime)
    if as_json:
        print(jsonlib.dumps({"schedule": name} | {key: timeline.to_json() for key, timeline in both._asdict().items()}))
    else:
        _show(name, both)
    if svg is not None:
        _write(svg, name, both, say=not as_json)


def _check_size(program: Program) -> None:
    ranks, found = len(program.schedule), []
    passes = program.num_stages * program.num_micro_batches
    if ranks > MOST_RANKS:
        rule = f"{ranks} ranks are more processes than the {MOST_RANKS} that --executed starts"
        found.append(Problem("pp", rule, "Take fewer."))
    if passes > MOST_PASSES:
        rule = f"the step has {passes:,} forward passes, and at most {MOST_PASSES:,} are run"
        found.append(Problem("micro_batches", rule, "Take fewer."))
    if found:
        raise SpecError(found)


def _show(name: str, both: Both) -> None:
    from ultrascale.plan.view.draw_schedule import draw_beside

    console = Console(highlight=False)
    ranks, cores = len(both.executed.schedule), os.cpu_count() or 1
    names = [f"rank {rank} " for rank in range(ranks)]
    margin = max(map(len, names))
    told = {"planned, with the mean seconds of each stage's passes": both.planned, "executed": both.executed}
    drawn = draw_beside(told, width=console.width - margin, colour=console.color_system is not None)
    console.print(f"[bold]{name}, {count_of(ranks, 'rank')} on {count_of(cores, 'CPU core')}, one small block a stage[/bold]\n")
    for title, lines in drawn.items():
        console.print(title)
        for rank, line in zip(names, lines, strict=True):
            console.print(rank.ljust(margin), line, sep="", soft_wrap=True)
        console.print()
    console.print(_waits(both))
    planned, executed = both
    console.print(f"\nA step is planned as {planned.step_seconds * 1e3:.1f} ms and took {executed.step_seconds * 1e3:.1f} ms;")
    console.print(f"ranks wait {planned.bubble_fraction:.1%} of it as planned, {executed.bubble_fraction:.1%} as executed.")
    if ranks > cores:
        console.print(
            f"{ranks} ranks share {count_of(cores, 'core')}: a pass that waits for a core counts as long as it takes."
        )


def _waits(both: Both) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("rank", "waits: planned", "executed"):
        table.add_column(column, justify="right")
    for rank in range(len(both.executed.schedule)):
        shares = (f"{timeline.bubble_seconds[rank] / timeline.step_seconds:.1%}" for timeline in both)
        table.add_row(str(rank), *shares)
    return table


def _write(path: Path, name: str, both: Both, *, say: bool) -> None:
    from ultrascale.plan.view.draw_schedule import svg_beside

    path.write_text(svg_beside({f"{name}, planned": both.planned, f"{name}, executed": both.executed}))
    if say:
        print(f"wrote {path}")
