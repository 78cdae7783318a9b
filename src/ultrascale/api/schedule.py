"""`ultrascale show schedule` as a function: a pipeline schedule simulated with given costs, or executed here; or all of
them."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.api.displays import Rows, TableRow, bars, figure, html
from ultrascale.api.extras import naming_extras
from ultrascale.api.keywords import read_keywords
from ultrascale.api.planning.plan_request import SHORT
from ultrascale.api.planning.run_of import ModelAndMachines, planned_run
from ultrascale.api.stamp import stamped
from ultrascale.description.layout import PipelineRuntime
from ultrascale.description.problems import Problem, expect_none, mistake
from ultrascale.description.schedules import SCHEDULE_ALIASES, SCHEDULES
from ultrascale.description.units import count_of
from ultrascale.output_file import write_output
from ultrascale.plan.memory.replay import num_micro_batches

if TYPE_CHECKING:
    from ultrascale.measure.executed import PlannedAndExecuted
    from ultrascale.plan.pipeline.play import Program, Timeline

MOST_RANKS = 512
"""Largest number of ranks: four times as many as in any published pipeline."""
MOST_COST = 1e12
"""Largest cost: above it, the end of a step exceeds any number."""
MOST_PASSES = 100_000
"""Most forward passes of a step over all stages that are simulated and drawn in seconds."""
MOST_EXECUTED_RANKS, MOST_EXECUTED_PASSES = 16, 2_000
"""Most processes to start on a machine, and most forward passes of a step, of which four steps run: a minute on two cores."""
COLOURS = {"F": "#3b6fb6", "W": "#4f9d69"}
"""Colours of forward passes and of weight-gradient passes; all others are backward passes."""


@dataclass(frozen=True)
class Costs:
    """Costs in seconds, or any unit of time, of one micro-batch through all the stages of a rank."""

    forward: float = 1.0
    """Time of the forward pass."""
    input_gradient: float = 1.0
    """Time of the gradients of activations (B)."""
    weight_gradient: float = 1.0
    """Time of the gradients of weights (W)."""
    communication: float = 0.0
    """Communication within each forward and input-gradient pass: what an overlapped pair (DualPipe) can hide."""
    send: float = 0.0
    """Time of one message between ranks."""


@dataclass(frozen=True)
class ScheduleOptions:
    """Simulate a pipeline schedule and draw it: when each rank computes, how long it waits, what it keeps in memory.

    For example:

        ultrascale show schedule 1f1b --pp 4 --micro-batches 8

        ultrascale show schedule interleaved --pp 4 --micro-batches 8 --virtual-stages 2 --svg interleaved.svg

    All schedules in one table:

        ultrascale show schedules --pp 8 --micro-batches 32
    """

    name: str = ""
    """Schedule that `ultrascale show schedules` lists, such as 1f1b or gpipe, or a CSV or JSON file of actions."""
    pp: int | None = None
    """Pipeline ranks. Default: 4, or as in the file."""
    micro_batches: int | None = None
    """Micro-batches per step. Default: 8, or as in the file."""
    virtual_stages: int | None = None
    """Virtual pipeline stages per rank, for schedules that allow any number, such as interleaved. Default: 2."""
    model: str | None = None
    """Model, as for `ultrascale plan`: the pipeline of the best layout of this model, --pp and NAME as given..."""
    gpus: str | None = None
    """... on these machines, such as 64xh100. Give degrees as for `plan`: --tp 8 --zero-stage 3."""
    seq_len: int | None = None
    """Sequence length in tokens, such as 8192 or 128k; with --model."""
    tokens_per_batch: str | None = None
    """Global batch in tokens, such as 4M; with --model."""
    cost: Costs = Costs()
    svg: Path | None = None
    """Also draw the step to this SVG file."""
    perfetto: Path | None = None
    """Also write a trace for ui.perfetto.dev."""
    csv: Path | None = None
    """Also write the actions to a file that `--layout.schedule FILE` reads, for editing."""
    executed: bool = False
    """Also run it on this machine's CPU with a small model, and show that below the simulation."""
    pipeline_runtime: PipelineRuntime = "ultrascale"
    """Runtime that runs the schedule with --executed, as `layout.pipeline_runtime`."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, repr=False)
class Schedule(Rows):
    """One simulated step of a pipeline."""

    name: str
    program: Program
    """Simulated program of actions."""
    timeline: Timeline
    """Start and end of each action."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.timeline.schedule)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.program.num_micro_batches

    @property
    def title(self) -> str:
        """`1f1b, 4 ranks, 8 micro-batches`"""
        return f"{self.name}, {count_of(self.num_ranks, 'rank')}, {count_of(self.num_micro_batches, 'micro-batch')}"

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale show schedule --json`: every action with its start and end."""
        about = {"schedule": self.name, "pp": self.num_ranks, "micro_batches": self.num_micro_batches}
        return stamped("schedule", about | self.timeline.to_json())

    def rows(self) -> list[TableRow]:
        """One row per rank: time computing and waiting, and how many micro-batches' activations it keeps."""
        ranks = self.timeline.to_json(actions=False)["ranks"]
        return [{**row, "bubble_fraction": row["bubble_seconds"] / self.timeline.step_seconds} for row in ranks]

    def to_svg(self) -> str:
        """SVG of the step, as `--svg` writes it."""
        from ultrascale.plan.view.draw_schedule import draw_svg

        return draw_svg(self.timeline, title=self.title, unit="units of time")

    def plot(self) -> Any:
        """A matplotlib figure, one line per rank: forward blue, backward orange, gradients of weights green. Raises
        NotInstalledError without matplotlib."""
        drawing = figure(repr(self), height=1.5 + 0.4 * self.num_ranks)
        axes = drawing.add_subplot()
        for rank, row in enumerate(self.timeline.schedule):
            for action, start, end in zip(row, self.timeline.start[rank], self.timeline.end[rank], strict=True):
                colour = next((colour for kind, colour in COLOURS.items() if kind in action.cell), "#e0a83c")
                axes.barh(rank, end - start, left=start, color=colour, edgecolor="white")
        axes.set_yticks(range(self.num_ranks), [f"rank {rank}" for rank in range(self.num_ranks)])
        axes.invert_yaxis()
        axes.set_xlabel("units of time")
        return drawing

    def __repr__(self) -> str:
        step, waits = self.timeline.step_seconds, self.timeline.bubble_fraction
        return f"Schedule({self.title}: a step takes {step:.4g}, bubble {waits:.1%} of it)"

    def _repr_html_(self) -> str:
        return f"<p><b>{self!r}</b></p>{self.to_svg()}"


@dataclass(frozen=True, repr=False)
class Schedules(Rows):
    """All schedules, simulated with the same costs."""

    schedules: tuple[Schedule, ...]
    num_ranks: int
    num_micro_batches: int

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale show schedules --json`: results by name of the schedule."""
        return {schedule.name: stamped("schedules", schedule.timeline.to_json(actions=False)) for schedule in self.schedules}

    def rows(self) -> list[TableRow]:
        """One row per schedule. Activations: peak on the rank with the highest peak, in micro-batches of all its stages.
        Messages: sent per micro-batch, mean over ranks."""
        return [_compared(schedule) for schedule in self.schedules]

    def plot(self) -> Any:
        """A matplotlib figure: the bubble as a share of the step, one bar per schedule. Raises NotInstalledError without
        matplotlib."""
        return bars(
            repr(self),
            [(schedule.name, 100 * schedule.timeline.bubble_fraction) for schedule in self.schedules],
            label="bubble, % of the step",
        )

    def __iter__(self):
        return iter(self.schedules)

    def __repr__(self) -> str:
        sizes = f"{count_of(self.num_ranks, 'rank')}, {count_of(self.num_micro_batches, 'micro-batch')}"
        return (
            f"Schedules({sizes}: {', '.join(f'{entry.name} {entry.timeline.bubble_fraction:.1%}' for entry in self.schedules)})"
        )

    def _repr_html_(self) -> str:
        return html(repr(self), [{**row, "bubble_fraction": f"{row['bubble_fraction']:.1%}"} for row in self.rows()])


@dataclass(frozen=True, repr=False)
class ExecutedSchedule(Rows):
    """One step of a small model on this machine's processes, compared with the simulated step."""

    name: str
    pair: PlannedAndExecuted

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale show schedule --executed --json`."""
        timelines = {key: timeline.to_json() for key, timeline in self.pair._asdict().items()}
        return stamped("schedule-executed", {"schedule": self.name} | timelines)

    def rows(self) -> list[TableRow]:
        """One row per rank: the share of the step that it waits, as planned and as executed."""
        waits = {
            key: [b / timeline.step_seconds for b in timeline.bubble_seconds] for key, timeline in self.pair._asdict().items()
        }
        pairs = zip(waits["planned"], waits["executed"], strict=True)
        return [{"rank": rank, "waits_planned": a, "waits_executed": b} for rank, (a, b) in enumerate(pairs)]

    def to_svg(self) -> str:
        """SVG of both steps, one below the other."""
        from ultrascale.plan.view.draw_schedule import svg_beside

        return svg_beside({f"{self.name}, {key}": timeline for key, timeline in self.pair._asdict().items()})

    def plot(self) -> Any:
        """A matplotlib figure of each rank's waiting, planned and executed. Raises NotInstalledError without matplotlib."""
        pairs = [(f"rank {row['rank']}, {key}", row[f"waits_{key}"]) for row in self.rows() for key in self.pair._fields]
        return bars(repr(self), pairs, label="share of the step")

    def __repr__(self) -> str:
        planned, executed = self.pair
        seconds = f"planned {planned.step_seconds * 1e3:.1f} ms, took {executed.step_seconds * 1e3:.1f} ms"
        return f"ExecutedSchedule({self.name}, {count_of(len(executed.schedule), 'rank')}: {seconds})"

    def _repr_html_(self) -> str:
        return f"<p><b>{self!r}</b></p>{self.to_svg()}"


def schedule(name: str | PathLike[str] | None = None, **settings: Any) -> Schedule | Schedules | ExecutedSchedule:
    """Simulate a pipeline schedule, `schedule("1f1b", pp=4, micro_batches=8)`; without a name, all of them.

    `settings` are the flags of `ultrascale show schedule` by name; `cost` is a mapping such as {"forward": 2}, in any unit of
    time. With `executed=True` a small model runs it on this machine, which needs torch.

    Raises SpecError for an unknown schedule, or for numbers that do not suit it.
    """
    request = read_keywords(ScheduleOptions, "show schedule", {"name": name, **settings}, positional=("name",), short=SHORT)
    with naming_extras("show schedule"):
        is_one = request.options.name or request.options.model is not None
        return answer(request.options, request.settings) if is_one else play_all(request.options, request.settings)


def answer(options: ScheduleOptions, settings: Sequence[str] = ()) -> Schedule | ExecutedSchedule:
    """Simulate one schedule, and write the requested files. `settings`: of the model's run."""
    sizes = {"pp": options.pp, "micro_batches": options.micro_batches}
    problems = [
        Problem(f"--{key.replace('_', '-')}", f"must be at least 1, is {value}", "Give a whole number from 1 on.")
        for key, value in sizes.items() if value is not None and value < 1
    ]  # fmt: skip
    if not options.name and options.model is None:
        _expect_no_settings([word for word in settings if _key(word) == "layout.schedule"])
        remedy = f"Take {', '.join(SCHEDULES)}, or a .csv or .json file."
        problems.append(Problem("NAME", "which schedule is missing", remedy))
    expect_none(problems)
    options = _with_planned_layout(options, settings)
    options = replace(options, name=SCHEDULE_ALIASES.get(options.name.lower(), options.name))
    program = _program(options)
    if options.pipeline_runtime != "ultrascale" and not options.executed:
        rule = "is whose loop executes the schedule, and nothing is executed here"
        raise mistake("--pipeline-runtime", rule, "Add --executed, or leave it out.")
    result = _executed(options, program) if options.executed else _played(options, options.name, program)
    _write_files(options, result)
    return result


def _with_planned_layout(options: ScheduleOptions, settings: Sequence[str]) -> ScheduleOptions:
    """Options with the schedule, ranks, stages and micro-batches of the best layout of the given model and machines, if any;
    costs stay those of `cost`."""
    described = ModelAndMachines.of(options)
    if not described.is_given:
        _expect_no_settings(settings)
        return options
    words = {"schedule": options.name or None, "pp": options.pp, "virtual_stages": options.virtual_stages}
    flags = [word for key, value in words.items() if value for word in (f"--layout.{key}", str(value))]
    run = planned_run(described, [*flags, *settings], run=None, verb="show schedule")
    layout = run.layout
    if layout.pp == 1:
        rule = f"the best layout of {options.model} on {options.gpus} has no pipeline"
        raise mistake("pp", rule, "Ask for one: --pp 4.")
    count = num_micro_batches(layout, run.batch.sequences_per_batch)
    known = layout.known_schedule
    virtual_stages = layout.virtual_stages if known and known.virtual_stages is None else None
    return replace(
        options, name=layout.schedule, pp=layout.pp, virtual_stages=virtual_stages, micro_batches=options.micro_batches or count
    )


def _expect_no_settings(settings: Sequence[str]) -> None:
    if settings:
        flag, key = settings[0].partition("=")[0], _key(settings[0])
        last = key.rpartition(".")[2]
        alternative = f"say --{last.replace('_', '-')}" if last in ScheduleOptions.__dataclass_fields__ else "leave it out"
        alternative = "give it as NAME of `show schedule`" if key == "layout.schedule" else alternative
        rule = "is a setting of a run, and no model says of which"
        raise mistake(flag, rule, f"Give --model and --gpus too, or {alternative}.")


def _key(word: str) -> str:
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def play_all(options: ScheduleOptions, settings: Sequence[str]) -> Schedules:
    """Simulate every schedule that such a pipeline can have. Raises SpecError for a name, settings of a run, or a file to
    write."""
    from ultrascale.plan.pipeline.play import program_of

    _expect_no_settings(settings)
    if options.name:
        raise mistake("name", f"`show schedules` takes no name, got {options.name}", "Say `show schedule`.")
    for flag in ("executed", "svg", "perfetto", "csv"):
        if getattr(options, flag):
            rule = f"is of one schedule, and `show schedules` compares all in a table: say `show schedule NAME --{flag}`"
            raise mistake(f"--{flag}", rule, "Name one, or leave the flag out.")
    pp, micro_batches = _size(options)
    _check_options(options)
    schedules = []
    for name, known in SCHEDULES.items():
        if known.even_ranks and pp % 2:
            continue
        program = program_of(name, pp, micro_batches, options.virtual_stages if known.virtual_stages is None else None)
        schedules.append(_played(options, name, program))
    return Schedules(tuple(schedules), pp, micro_batches)


def _executed(options: ScheduleOptions, program: Program) -> ExecutedSchedule:
    """Run the schedule with its runtime. Raises SpecError if it is too large for one machine, or not trainable."""
    _expect_measured(options)
    ranks, problems = len(program.schedule), []
    passes = program.num_stages * program.num_micro_batches
    if ranks > MOST_EXECUTED_RANKS:
        rule = f"{ranks} ranks are more processes than the {MOST_EXECUTED_RANKS} that --executed starts"
        problems.append(Problem("pp", rule, "Take fewer."))
    if passes > MOST_EXECUTED_PASSES:
        rule = f"the step has {passes:,} forward passes, and at most {MOST_EXECUTED_PASSES:,} are run"
        problems.append(Problem("micro_batches", rule, "Take fewer."))
    expect_none(problems)
    from ultrascale.measure.executed import execute_schedule

    return ExecutedSchedule(options.name, execute_schedule(options.name, program, options.pipeline_runtime))


def _expect_measured(options: ScheduleOptions) -> None:
    """Raises SpecError for options that have no effect on measured costs."""
    problems = []
    if options.cost != Costs():
        problems.append(Problem("cost", "is measured with --executed", "Leave out one of the two."))
    if options.perfetto is not None:
        problems.append(Problem("perfetto", "holds one step, and --executed shows two", "Use --svg or --json."))
    if options.csv is not None:
        problems.append(Problem("csv", "holds actions, and nothing of how they were executed", "Leave out one of the two."))
    expect_none(problems)


def _program(options: ScheduleOptions) -> Program:
    """The requested schedule; a file sets its own number of ranks and micro-batches."""
    from ultrascale.plan.pipeline.play import compile_schedule, program_of
    from ultrascale.schedules.build import is_file
    from ultrascale.schedules.kinds.custom import read_schedule

    if is_file(options.name):
        sizes = {"pp": options.pp, "micro_batches": options.micro_batches, "virtual_stages": options.virtual_stages}
        if given_flags := [f"--{key.replace('_', '-')}" for key, value in sizes.items() if value is not None]:
            raise mistake(given_flags[0], f"{options.name} says that itself", f"Leave out {' and '.join(given_flags)}.")
        actions = read_schedule(Path(options.name))
        _check_size(len(actions), sum(map(len, actions)) // 2, remedy="Write a shorter step to the file.")
        return compile_schedule(actions)
    _check_options(options)
    return program_of(options.name, *_size(options), options.virtual_stages)


def _size(options: ScheduleOptions) -> tuple[int, int]:
    return (4 if options.pp is None else options.pp), (8 if options.micro_batches is None else options.micro_batches)


def _check_options(options: ScheduleOptions) -> None:
    pp, micro_batches = _size(options)
    passes = pp * micro_batches * max(1, options.virtual_stages or 1)
    _check_size(pp, passes, remedy="A step repeats itself: 2 to 4 micro-batches a rank show all there is to see.")


def _check_size(ranks: int, passes: int, *, remedy: str) -> None:
    """Raises SpecError for a size that would take minutes to simulate and thousands of lines to print."""
    problems = []
    if ranks > MOST_RANKS:
        problems.append(Problem("pp", f"{ranks:,} ranks are more than the {MOST_RANKS} that are drawn", "Take fewer."))
    if passes > MOST_PASSES:
        rule = f"the step has {passes:,} forward passes, and at most {MOST_PASSES:,} are played"
        problems.append(Problem("micro_batches", rule, remedy))
    expect_none(problems)


def _played(options: ScheduleOptions, name: str, program: Program) -> Schedule:
    from ultrascale.plan.pipeline.play import StageSeconds, play

    _check_costs(options.cost)
    cost, share = options.cost, len(program.schedule) / program.num_stages
    passes = (cost.forward * share, cost.input_gradient * share, cost.weight_gradient * share)
    talk = cost.communication * share
    seconds = StageSeconds(*passes, cost.send, forward_communication=talk, backward_communication=talk)
    return Schedule(name, program, play(program, seconds))


def _check_costs(cost: Costs) -> None:
    problems = [
        Problem(f"cost.{key}", f"must be from 0 to {MOST_COST:g}, is {value:g}", "Give a time; its unit is yours.")
        for key, value in vars(cost).items()
        if not 0 <= value <= MOST_COST
    ]
    expect_none(problems)
    if cost.communication > min(cost.forward, cost.input_gradient):
        rule = f"is part of forward and of input_gradient, but {cost.communication:g} is more than one of them"
        problems.append(Problem("cost.communication", rule, f"Give at most {min(cost.forward, cost.input_gradient):g}."))
    if cost.forward + cost.input_gradient + cost.weight_gradient == 0:
        problems.append(Problem("cost", "everything takes no time", "Give one of them a time."))
    expect_none(problems)


def _compared(schedule: Schedule) -> TableRow:
    copies, timeline, program = SCHEDULES[schedule.name].copies, schedule.timeline, schedule.program
    ranks, num_stages = schedule.num_ranks, program.num_stages
    sent = (program.borders < num_stages - 1).sum() / (ranks * program.num_micro_batches)
    most_kept = max(in_flight.total for in_flight in timeline.in_flight) * ranks / num_stages
    return {
        "schedule": schedule.name, "stages_a_rank": num_stages * copies // ranks, "weights": copies,
        "step_seconds": timeline.step_seconds, "bubble_fraction": timeline.bubble_fraction, "activations_kept": most_kept,
        "messages": float(sent),
    }  # fmt: skip


def _write_files(options: ScheduleOptions, result: Schedule | ExecutedSchedule) -> None:
    if options.svg is not None:
        write_output(options.svg, result.to_svg())
    if isinstance(result, ExecutedSchedule):
        return
    if options.perfetto is not None:
        from ultrascale.plan.view.trace_events import trace_events

        write_output(options.perfetto, jsonlib.dumps(trace_events(result.timeline, title=result.title)))
    if options.csv is not None:
        from ultrascale.schedules.kinds.custom import to_csv

        write_output(options.csv, to_csv(result.timeline.schedule))
