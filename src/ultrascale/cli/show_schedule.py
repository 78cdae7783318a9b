"""`ultrascale show schedule`: a pipeline schedule played and drawn; `ultrascale show schedules`: all of them on one table."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table

from ultrascale.cli.parse import parse
from ultrascale.cli.show_executed import show_executed
from ultrascale.spec.layout import PipelineRuntime
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.units import count_of

if TYPE_CHECKING:
    from ultrascale.plan.pipeline.play import Program, Timeline

MOST_BLOCKS = 4
"""Lines a rank on the terminal; of longer steps the middle is left out."""
MOST_LINES = 256
"""Of the picture on the terminal: of many ranks fewer blocks are shown."""
MOST_RANKS = 512
"""As many as there are in any pipeline that was published, four times over."""
MOST_COST = 1e12
"""More, and a step has no end that a number could hold."""
MOST_PASSES = 100_000
"""Forward passes of a step over all stages: what is played and drawn in seconds."""
COPIES = {"dualpipe": 2}
"""Copies of the weights that a schedule needs, where it is not one."""


@dataclass(frozen=True)
class Costs:
    """Seconds, or any unit of time, of one micro-batch through all the stages of a rank."""

    forward: float = 1.0
    """Its forward pass."""
    input_gradient: float = 1.0
    """The gradients of its activations."""
    weight_gradient: float = 1.0
    """The gradients of its weights."""
    communication: float = 0.0
    """Of each of forward and input_gradient: what an overlapped pair (dualpipe) can hide."""
    send: float = 0.0
    """One message between ranks."""


@dataclass(frozen=True)
class ShowSchedule:
    """Play a pipeline schedule and draw it: when each rank does what, how long it waits, what it keeps.

    For example:

        ultrascale show schedule 1f1b --pp 4 --micro-batches 8

        ultrascale show schedule interleaved --pp 4 --micro-batches 8 --virtual-stages 2 --svg interleaved.svg

    All of them on one table:

        ultrascale show schedules --pp 8 --micro-batches 32
    """

    what: Annotated[str, tyro.conf.Positional]
    """`schedule`, or `schedules` for all."""
    name: Annotated[str, tyro.conf.Positional] = ""
    """afab, 1f1b, interleaved, breadth-first, zb-h1, zb-v, dualpipe, dualpipe-v, or a CSV or JSON file of actions."""
    pp: int | None = None
    """Ranks of the pipeline. Default: 4, or what the file says."""
    micro_batches: int | None = None
    """Micro-batches of a step. Default: 8, or what the file says."""
    virtual_stages: int | None = None
    """Stages a rank: for interleaved and breadth-first, 2 if not given."""
    cost: Costs = Costs()
    svg: Path | None = None
    """Also write a picture."""
    perfetto: Path | None = None
    """Also write a trace for ui.perfetto.dev."""
    csv: Path | None = None
    """Also write the actions as the file that `--layout.schedule FILE` reads, to be changed."""
    executed: bool = False
    """Also run it on this machine's CPU, with a small model, and show that below what is planned."""
    pipeline_runtime: PipelineRuntime = "ultrascale"
    """Whose loop --executed runs it with, as `layout.pipeline_runtime`."""
    json: bool = False
    """Print one JSON object."""


def command(arguments: list[str]) -> int:
    """Run the verb. Raises SpecError if the schedule is unknown or the numbers do not suit it."""
    asked = parse(ShowSchedule, "show", arguments)
    if asked.what == "schedules":
        if asked.name:
            raise SpecError([Problem("name", f"`show schedules` takes no name, got {asked.name}", "Say `show schedule`.")])
        for flag in ("executed", "svg", "perfetto", "csv"):
            if getattr(asked, flag):
                rule = f"is of one schedule, and `show schedules` compares all in a table: say `show schedule NAME --{flag}`"
                raise SpecError([Problem(f"--{flag}", rule, "Name one, or leave the flag out.")])
        return _show_all(asked)
    if not asked.name:
        from ultrascale.schedules.build import NAMES

        raise SpecError([Problem("name", "which schedule is missing", f"Take {', '.join(NAMES)}, or a .csv or .json file.")])
    program = _program(asked)
    if asked.pipeline_runtime != "ultrascale" and not asked.executed:
        rule = "is whose loop executes the schedule, and nothing is executed here"
        raise SpecError([Problem("--pipeline-runtime", rule, "Add --executed, or leave it out.")])
    if asked.executed:
        _expect_measured(asked)
        show_executed(asked.name, program, asked.pipeline_runtime, svg=asked.svg, as_json=asked.json)
        return 0
    timeline = _played(asked, asked.name, program)
    ranks, micro_batches = len(program.schedule), program.num_micro_batches
    title = f"{asked.name}, {count_of(ranks, 'rank')}, {count_of(micro_batches, 'micro-batch')}"
    if asked.json:
        print(jsonlib.dumps({"schedule": asked.name, "pp": ranks, "micro_batches": micro_batches} | timeline.to_json()))
    else:
        _show_one(timeline, title)
    _write_files(asked, timeline, title, say=not asked.json)
    return 0


def _expect_measured(asked: ShowSchedule) -> None:
    """Raise SpecError for what has no meaning where costs are measured."""
    found = []
    if asked.cost != Costs():
        found.append(Problem("cost", "is measured with --executed", "Leave out one of the two."))
    if asked.perfetto is not None:
        found.append(Problem("perfetto", "holds one step, and --executed shows two", "Use --svg or --json."))
    if asked.csv is not None:
        found.append(Problem("csv", "holds actions, and nothing of how they were executed", "Leave out one of the two."))
    if found:
        raise SpecError(found)


def _program(asked: ShowSchedule) -> Program:
    """The schedule asked for; a file says itself for how many ranks and micro-batches it is."""
    from ultrascale.plan.pipeline.play import compile_schedule, program_of
    from ultrascale.schedules.build import is_file
    from ultrascale.schedules.custom import read_schedule

    if is_file(asked.name):
        given = {"pp": asked.pp, "micro_batches": asked.micro_batches, "virtual_stages": asked.virtual_stages}
        if said := [f"--{key.replace('_', '-')}" for key, value in given.items() if value is not None]:
            raise SpecError([Problem(said[0], f"{asked.name} says that itself", f"Leave out {' and '.join(said)}.")])
        actions = read_schedule(Path(asked.name))
        _check_size(len(actions), sum(map(len, actions)) // 2, remedy="Write a shorter step to the file.")
        return compile_schedule(actions)
    _check_asked(asked)
    return program_of(asked.name, *_size(asked), asked.virtual_stages)


def _size(asked: ShowSchedule) -> tuple[int, int]:
    return (4 if asked.pp is None else asked.pp), (8 if asked.micro_batches is None else asked.micro_batches)


def _check_asked(asked: ShowSchedule) -> None:
    pp, micro_batches = _size(asked)
    passes = pp * micro_batches * max(1, asked.virtual_stages or 1)
    _check_size(pp, passes, remedy="A step repeats itself: 2 to 4 micro-batches a rank show all there is to see.")


def _check_size(ranks: int, passes: int, *, remedy: str) -> None:
    """Raise SpecError for what would take minutes to play and thousands of lines to print."""
    found = []
    if ranks > MOST_RANKS:
        found.append(Problem("pp", f"{ranks:,} ranks are more than the {MOST_RANKS} that are drawn", "Take fewer."))
    if passes > MOST_PASSES:
        rule = f"the step has {passes:,} forward passes, and at most {MOST_PASSES:,} are played"
        found.append(Problem("micro_batches", rule, remedy))
    if found:
        raise SpecError(found)


def _played(asked: ShowSchedule, name: str, program: Program) -> Timeline:
    from ultrascale.plan.pipeline.pipeline_bounds import STAGES_A_RANK
    from ultrascale.plan.pipeline.play import StageSeconds, play

    _check_costs(asked.cost)
    cost, share = asked.cost, 1 / STAGES_A_RANK.get(name, program.num_stages / len(program.schedule))
    passes = (cost.forward * share, cost.input_gradient * share, cost.weight_gradient * share)
    talk = cost.communication * share
    return play(program, StageSeconds(*passes, cost.send, forward_communication=talk, backward_communication=talk))


def _check_costs(cost: Costs) -> None:
    found = [
        Problem(f"cost.{key}", f"must be from 0 to {MOST_COST:g}, is {value:g}", "Give a time; its unit is yours.")
        for key, value in vars(cost).items()
        if not 0 <= value <= MOST_COST
    ]
    if found:
        raise SpecError(found)
    if cost.communication > min(cost.forward, cost.input_gradient):
        rule = f"is part of forward and of input_gradient, but {cost.communication:g} is more than one of them"
        found.append(Problem("cost.communication", rule, f"Give at most {min(cost.forward, cost.input_gradient):g}."))
    if cost.forward + cost.input_gradient + cost.weight_gradient == 0:
        found.append(Problem("cost", "everything takes no time", "Give one of them a time."))
    if found:
        raise SpecError(found)


def _show_one(timeline: Timeline, title: str) -> None:
    from ultrascale.plan.view.draw_schedule import draw_text

    console = Console(highlight=False)
    console.print(f"[bold]{title}[/bold]\n")
    names = [f"rank {rank} " for rank in range(len(timeline.schedule))]
    margin = max(map(len, names))
    blocks = draw_text(timeline, width=console.width - margin, colour=console.color_system is not None)
    ends = max(1, min(MOST_BLOCKS, MOST_LINES // len(names)) // 2)  # blocks shown at either end
    for number, block in enumerate(blocks):
        if ends <= number < len(blocks) - ends:
            if number == ends:
                console.print(f"... {len(blocks) - 2 * ends} as long as these; --svg draws all of them\n", style="dim")
            continue
        for name, line in zip(names, block, strict=True):
            console.print(name.ljust(margin), line, sep="", soft_wrap=True)
        console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("rank", "stages", "computes", "waits", "", "activations", "for W only"):
        table.add_column(column, justify="left" if column == "stages" else "right")
    for rank, (row, busy, idle, held) in enumerate(
        zip(timeline.schedule, timeline.busy_seconds, timeline.bubble_seconds, timeline.in_flight, strict=True)
    ):
        stages = ", ".join(map(str, sorted({part.stage for action in row for part in action.parts})))
        share = f"{idle / timeline.step_seconds:.1%}"
        table.add_row(str(rank), stages, _number(busy), _number(idle), share, str(held.total), str(held.waiting or ""))
    console.print(table)
    console.print(f"\nA step takes {_number(timeline.step_seconds)}; ranks wait {timeline.bubble_fraction:.1%} of it.")
    console.print("Activations: the most at once, in micro-batches of one stage.")


def _show_all(asked: ShowSchedule) -> int:
    from ultrascale.plan.pipeline.play import program_of
    from ultrascale.schedules.build import NAMES

    pp, micro_batches = _size(asked)
    _check_asked(asked)
    rows = []
    for name, known in NAMES.items():
        if name == "dualpipe" and pp % 2:
            continue
        program = program_of(name, pp, micro_batches, asked.virtual_stages if known.virtual_stages is None else None)
        rows.append((name, program, _played(asked, name, program)))
    if asked.json:
        print(jsonlib.dumps({name: timeline.to_json(actions=False) for name, _, timeline in rows}))
        return 0
    console = Console(highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("schedule", "stages a rank", "weights", "step", "waits", "activations kept", "messages"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for name, program, timeline in rows:
        table.add_row(name, *_compared(name, program, timeline))
    console.print(f"[bold]{count_of(pp, 'rank')}, {count_of(micro_batches, 'micro-batch')}[/bold]\n")
    console.print(table)
    console.print("\nActivations: the most at once on the rank that keeps most, in micro-batches of all its stages.")
    console.print("Messages: sent a micro-batch, the mean of the ranks.")
    return 0


def _compared(name: str, program: Program, timeline: Timeline) -> list[str]:
    copies = COPIES.get(name, 1)
    ranks, num_stages = len(program.schedule), program.num_stages
    kept = max(held.total for held in timeline.in_flight) * ranks / num_stages
    sent = (program.borders < num_stages - 1).sum() / (ranks * program.num_micro_batches)
    step, waits = _number(timeline.step_seconds), f"{timeline.bubble_fraction:.1%}"
    return [str(num_stages * copies // ranks), f"{copies}x", step, waits, f"{kept:.4g}", f"{sent:.3g}"]


def _number(value: float) -> str:
    """Four digits, and as many as there are before the point."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"


def _write_files(asked: ShowSchedule, timeline: Timeline, title: str, *, say: bool) -> None:
    from ultrascale.schedules.custom import to_csv

    if asked.svg is not None:
        from ultrascale.plan.view.draw_schedule import draw_svg

        asked.svg.write_text(draw_svg(timeline, title=title, unit="units of time"))
    if asked.perfetto is not None:
        from ultrascale.plan.view.trace_events import trace_events

        asked.perfetto.write_text(jsonlib.dumps(trace_events(timeline, title=title)))
    if asked.csv is not None:
        asked.csv.write_text(to_csv(timeline.schedule))
    for path in (asked.svg, asked.perfetto, asked.csv):
        if path is not None and say:
            print(f"wrote {path}")
