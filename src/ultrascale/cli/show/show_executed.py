"""`ultrascale show schedule NAME --executed`: the step as it was run on this machine, below the step as it was planned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.table import Table

from ultrascale.api.schedule import ExecutedSchedule
from ultrascale.cli.terminal.screen import console_for_people, drawing_width
from ultrascale.description.units import count_of

if TYPE_CHECKING:
    from ultrascale.measure.executed import Both


def show_executed(found: ExecutedSchedule) -> None:
    """Print both, and what each rank waits."""
    from ultrascale.plan.view.draw_schedule import draw_beside

    console, both = console_for_people(), found.both
    ranks, cores = len(both.executed.schedule), os.cpu_count() or 1
    names = [f"rank {rank} " for rank in range(ranks)]
    margin = max(map(len, names))
    told = {"planned, with the mean seconds of each stage's passes": both.planned, "executed": both.executed}
    drawn = draw_beside(told, width=drawing_width(console) - margin, colour=console.color_system is not None)
    console.print(
        f"[bold]{found.name}, {count_of(ranks, 'rank')} on {count_of(cores, 'CPU core')}, one small block a stage[/bold]\n"
    )
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
