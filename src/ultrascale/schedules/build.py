"""Builds the action lists of a schedule, by name (`description.schedules`) or from a file, and says what each needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path

from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.schedules import SCHEDULE_FILES, SCHEDULES
from ultrascale.description.units import count_of
from ultrascale.schedules.actions import Action
from ultrascale.schedules.executable import ranks_of_stages
from ultrascale.schedules.kinds.custom import read_schedule
from ultrascale.schedules.kinds.interleaved import rounds

DEFAULT_VIRTUAL_STAGES = 2


@cache
def builder_of(name: str) -> Callable[..., list[list[Action]]]:
    """Function that builds the lists of a named schedule."""
    module_name = SCHEDULES[name].builder
    return getattr(import_module(f"ultrascale.schedules.kinds.{module_name}"), module_name)


def build_schedule(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None = None) -> list[list[Action]]:
    """One list of actions for each of `pp` ranks, for a schedule of `SCHEDULES` or of a CSV or JSON file.

    `virtual_stages`: stages per rank; None: the schedule's fixed number, or 2 where it allows any. Raises SpecError if the name
    is unknown, or the numbers do not fit the schedule or the file.
    """
    if name not in SCHEDULES:
        return _from_file(name, pp, num_micro_batches)
    if problems := schedule_problems(name, pp, num_micro_batches, virtual_stages):
        raise SpecError(problems)
    return builder_of(name)(pp, num_micro_batches, **_stages(name, virtual_stages))


def actions_of_ranks(
    name: str, pp: int, num_micro_batches: int, virtual_stages: int | None, ranks: Sequence[int]
) -> dict[int, list[Action]]:
    """Actions of `ranks`, by rank, for a schedule of `SCHEDULES`; only theirs are built if its builder takes `ranks`."""
    build = builder_of(name)
    if not _takes_ranks(build):
        every = build_schedule(name, pp, num_micro_batches, virtual_stages)
        return {rank: every[rank] for rank in ranks}
    return dict(zip(ranks, build(pp, num_micro_batches, ranks=ranks, **_stages(name, virtual_stages)), strict=True))


@cache
def _takes_ranks(build: Callable[..., list[list[Action]]]) -> bool:
    return "ranks" in signature(build).parameters


def _stages(name: str, virtual_stages: int | None) -> dict[str, int]:
    return {"virtual_stages": virtual_stages or DEFAULT_VIRTUAL_STAGES} if SCHEDULES[name].virtual_stages is None else {}


def schedule_problems(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None) -> list[Problem]:
    """Problems of these numbers with the schedule `name` of `SCHEDULES`; keys as in `Layout`."""
    known = SCHEDULES[name]
    fixed_stages = known.virtual_stages
    problems: list[Problem] = []
    for key, value in (("pp", pp), ("micro_batches", num_micro_batches), ("virtual_stages", virtual_stages)):
        if value is not None and value < 1:
            problems.append(Problem(key, f"must be at least 1, is {value}", "Give a whole number from 1 on."))
    if fixed_stages is not None and virtual_stages not in (None, fixed_stages):
        rule = f"the schedule {name} has {fixed_stages} stage{'s' * (fixed_stages > 1)} a rank, not {virtual_stages}"
        many = " or ".join(other for other, schedule in SCHEDULES.items() if schedule.virtual_stages is None)
        problems.append(Problem("virtual_stages", rule, f"Set {fixed_stages}, or take {many}."))
    if known.even_ranks and pp % 2:
        rule = f"{known.title} pairs rank r with rank pp-1-r, so pp must be even, is {pp}"
        problems.append(Problem("pp", rule, f"Take {pp + 1}, or the schedule {known.inferior_to}, which takes any."))
    return problems


def enough_micro_batches(name: str, pp: int, num_micro_batches: int) -> int:
    """Smallest number of micro-batches after which a schedule of `SCHEDULES` repeats itself: more hold no more memory, and each
    `copies` of them send the same. All of them where all forward passes come first."""
    known = SCHEDULES[name]
    if known.forward_first:
        return num_micro_batches
    if known.in_rounds:
        sizes = [len(micro_batches) for micro_batches in rounds(pp, num_micro_batches)]
        num_larger = sum(size > sizes[-1] for size in sizes)  # the first ones
        few = sum(sizes[:num_larger][:3]) + sum(sizes[num_larger:][:3])
        return num_micro_batches if len(sizes) <= 6 else few
    few = (known.warm_up + known.copies - 1) * pp + 2
    return num_micro_batches if num_micro_batches <= few else few + (num_micro_batches - few) % known.copies


def stages_of_ranks(name: str, pp: int, virtual_stages: int | None = None) -> list[list[int]]:
    """Stages that each of `pp` ranks holds, for any number of micro-batches. Raises SpecError as `build_schedule`."""
    if name in SCHEDULES and not schedule_problems(name, pp, 2, virtual_stages):
        known = SCHEDULES[name]
        stages = pp * known.stages_a_rank(virtual_stages or DEFAULT_VIRTUAL_STAGES)
        return [sorted(rank_stages) for rank_stages in known.stages_of_ranks(pp, stages)]
    schedule = smallest_schedule(name, pp, virtual_stages)
    ranks_by_stage = ranks_of_stages(schedule)
    return [[stage for stage, ranks in enumerate(ranks_by_stage) if rank in ranks] for rank in range(len(schedule))]


def smallest_schedule(name: str, pp: int, virtual_stages: int | None) -> list[list[Action]]:
    """A small step in which every stage runs a micro-batch on every rank that holds it: a file's own step, else one of two
    micro-batches."""
    return read_schedule(Path(name)) if is_file(name) else build_schedule(name, pp, 2, virtual_stages)


def is_file(name: str) -> bool:
    """True if `name` is the path of a file of actions."""
    return Path(name).suffix in SCHEDULE_FILES


def _from_file(name: str, pp: int, num_micro_batches: int) -> list[list[Action]]:
    if not is_file(name):
        raise SpecError(
            [Problem("schedule", f"there is no schedule {name!r}", f"Take {', '.join(SCHEDULES)}, or a .csv or .json file.")]
        )
    actions = read_schedule(Path(name))
    count = 1 + max(part.micro_batch for row in actions for action in row for part in action.parts)
    problems = []
    if len(actions) != pp:
        problems.append(Problem("pp", f"{name} has {count_of(len(actions), 'rank')}, not {pp}", f"Set pp to {len(actions)}."))
    if count != num_micro_batches:
        has = count_of(count, "micro-batch")
        rule, remedy = f"{name} has {has}, not {num_micro_batches}", f"Make a step {has} of a rank, or write another file."
        problems.append(Problem("micro_batches", rule, remedy))
    if problems:
        raise SpecError(problems)
    return actions
