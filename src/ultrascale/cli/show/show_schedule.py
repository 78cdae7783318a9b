"""`ultrascale show schedule`: a pipeline schedule simulated and drawn; `ultrascale show schedules`: all of them in one table.

With `--executed`, also the step as it ran on this machine, below the planned step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ultrascale.api.planning.plan_request import SHORT
from ultrascale.api.schedule import ExecutedSchedule, Schedule, ScheduleOptions, Schedules, answer, play_all
from ultrascale.catalogue.machines import usable_cores
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, drawing_width, print_json
from ultrascale.console import plain_table
from ultrascale.description.units import count_of

MOST_BLOCKS = 4
"""Most lines per rank on the terminal; the middle of longer steps is omitted."""
MOST_LINES = 256
"""Most lines of the picture on the terminal: with many ranks fewer blocks are shown."""


def command(arguments: list[str]) -> int:
    """Run the verb. Raises SpecError if the schedule is unknown or the numbers do not suit it."""
    word = arguments[0]
    positional, name = {"name": None}, f"show {word}"
    options, settings = parse_with_overrides(ScheduleOptions, name, arguments[1:], positional=positional, short=SHORT)
    result = play_all(options, settings) if word == "schedules" else answer(options, settings)
    if options.json:
        print_json(result.to_dict())
    elif isinstance(result, Schedules):
        _show_schedules(result)
    elif isinstance(result, ExecutedSchedule):
        show_executed(result)
    else:
        _show_schedule(result)
    for path in (options.svg, options.perfetto, options.csv):
        if path is not None and not options.json:
            print(f"wrote {path}")
    return 0


def _show_schedule(schedule: Schedule) -> None:
    from ultrascale.plan.view.draw_schedule import draw_text

    console, timeline = console_for_people(), schedule.timeline
    console.print(f"[bold]{schedule.title}[/bold]\n")
    names = [f"rank {rank} " for rank in range(len(timeline.schedule))]
    margin = max(map(len, names))
    blocks = draw_text(timeline, width=drawing_width(console) - margin, colour=console.color_system is not None)
    ends = max(1, min(MOST_BLOCKS, MOST_LINES // len(names)) // 2)  # blocks shown at each end
    for number, block in enumerate(blocks):
        if ends <= number < len(blocks) - ends:
            if number == ends:
                console.print(f"... {len(blocks) - 2 * ends} as long as these; --svg draws all of them\n", style="dim")
            continue
        for name, line in zip(names, block, strict=True):
            console.print(name.ljust(margin), line, sep="", soft_wrap=True)
        console.print()
    table = plain_table("rank", "stages", "computes", "bubble", "", "activations", "for W only", left=("stages",))
    for row in schedule.rows():
        table.add_row(
            str(row["rank"]), ", ".join(map(str, row["stages"])), _number(row["busy_seconds"]), _number(row["bubble_seconds"]),
            f"{row['bubble_fraction']:.1%}", str(row["in_flight"]), str(row["in_flight_for_weights"] or ""),
        )  # fmt: skip
    console.print(table)
    waits = timeline.bubble_fraction  # of the step; (pp - 1) / micro-batches of 1F1B is of the time that ranks compute
    bubble = f"{waits:.1%} of it, {waits / (1 - waits):.1%} of the time that ranks compute"
    console.print(f"\nA step takes {_number(timeline.step_seconds)}; the bubble is {bubble}.")
    console.print("Activations: the most at once, in micro-batches of one stage.")


def _show_schedules(schedules: Schedules) -> None:
    console = console_for_people()
    columns = ("schedule", "stages a rank", "weights", "step", "bubble", "activations kept", "messages")
    table = plain_table(*columns, left=("schedule",))
    for row in schedules.rows():
        table.add_row(
            row["schedule"], str(row["stages_a_rank"]), f"{row['weights']}x", _number(row["step_seconds"]),
            f"{row['bubble_fraction']:.1%}", f"{row['activations_kept']:.4g}", f"{row['messages']:.3g}",
        )  # fmt: skip
    sizes = f"{count_of(schedules.num_ranks, 'rank')}, {count_of(schedules.num_micro_batches, 'micro-batch')}"
    console.print(f"[bold]{sizes}[/bold]\n")
    console.print(table)
    console.print(
        "\nBubble: share of the step that ranks wait; the playbook's (pp - 1) / micro-batches is of the time they compute."
    )
    console.print("Activations: the most at once on the rank that keeps most, in micro-batches of all its stages.")
    console.print("Messages: sent a micro-batch, the mean of the ranks.")


def _number(value: float) -> str:
    """A number with four digits, or as many as it has before the decimal point."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


if TYPE_CHECKING:
    from ultrascale.measure.executed import PlannedAndExecuted


def show_executed(result: ExecutedSchedule) -> None:
    """Print the planned and the executed step, and each rank's bubble."""
    from ultrascale.plan.view.draw_schedule import draw_beside

    console, pair = console_for_people(), result.pair
    ranks, cores = len(pair.executed.schedule), usable_cores()
    names = [f"rank {rank} " for rank in range(ranks)]
    margin = max(map(len, names))
    timelines = {"planned, with the mean seconds of each stage's passes": pair.planned, "executed": pair.executed}
    drawn = draw_beside(timelines, width=drawing_width(console) - margin, colour=console.color_system is not None)
    console.print(
        f"[bold]{result.name}, {count_of(ranks, 'rank')} on {count_of(cores, 'CPU core')}, one small block a stage[/bold]\n"
    )
    for title, lines in drawn.items():
        console.print(title)
        for rank, line in zip(names, lines, strict=True):
            console.print(rank.ljust(margin), line, sep="", soft_wrap=True)
        console.print()
    console.print(_bubbles(pair))
    planned, executed = pair
    console.print(f"\nA step is planned as {planned.step_seconds * 1e3:.1f} ms and took {executed.step_seconds * 1e3:.1f} ms;")
    console.print(f"the bubble is {planned.bubble_fraction:.1%} of it as planned, {executed.bubble_fraction:.1%} as executed.")
    if ranks > cores:
        console.print(
            f"{ranks} ranks share {count_of(cores, 'core')}: a pass that waits for a core counts as long as it takes."
        )


def _bubbles(pair: PlannedAndExecuted) -> Table:
    table = plain_table("rank", "bubble: planned", "executed", left=())
    for rank in range(len(pair.executed.schedule)):
        shares = (f"{timeline.bubble_seconds[rank] / timeline.step_seconds:.1%}" for timeline in pair)
        table.add_row(str(rank), *shares)
    return table
