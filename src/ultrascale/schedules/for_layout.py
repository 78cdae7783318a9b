"""The schedule that a layout's pipeline executes, or why it cannot: known before a process starts."""

from __future__ import annotations

from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.schedules import SCHEDULES
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.executable import Schedule, check_executable, ranks_of_stages, shape_of


def schedule_of(layout: Layout, num_micro_batches: int) -> Schedule:
    """The actions of a step of `layout` with so many micro-batches on each rank.

    Raises SpecError for a schedule that does not suit, cannot be executed, or wants two copies of the weights.
    """
    schedule = build_schedule(layout.schedule, layout.pp, num_micro_batches, layout.virtual_stages)
    check_executable(schedule)
    num_stages = shape_of(schedule)[0]
    problems = []
    if num_stages != layout.num_stages:
        rule = f"{layout.schedule} has {num_stages} stages, but pp x virtual_stages is {layout.num_stages}"
        problems.append(Problem("layout.virtual_stages", rule, f"Set it to {num_stages // layout.pp}."))
    if any(len(ranks) > 1 for ranks in ranks_of_stages(schedule)):
        rule = f"{layout.schedule} keeps two copies of every stage: twice the memory of the state, and a sum of gradients more"
        single = next(one.inferior_to for one in SCHEDULES.values() if one.copies > 1)
        remedy = f'Use schedule = "{single}": the same order of passes with one copy.'
        problems.append(Problem("layout.schedule", rule, remedy))
    if problems:
        raise SpecError(problems)
    return schedule
