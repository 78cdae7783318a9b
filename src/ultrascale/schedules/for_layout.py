"""The schedule that a layout's pipeline executes, or the reason why it cannot: known before any process starts."""

from __future__ import annotations

from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.executable import Schedule, check_executable, ranks_of_stages, shape_of


def schedule_of(layout: Layout, num_micro_batches: int) -> Schedule:
    """Actions of a step of `layout` with `num_micro_batches` on each rank.

    Raises SpecError for a schedule that does not fit, cannot be executed, or has a stage on ranks that do not hold the same
    stages.
    """
    schedule = build_schedule(layout.schedule, layout.pp, num_micro_batches, layout.virtual_stages)
    check_executable(schedule)
    num_stages = shape_of(schedule)[0]
    problems = []
    if num_stages != layout.num_stages:
        rule = f"{layout.schedule} has {num_stages} stages, but pp x virtual_stages is {layout.num_stages}"
        problems.append(Problem("layout.virtual_stages", rule, f"Set it to {num_stages // layout.pp}."))
    ranks_by_stage = ranks_of_stages(schedule)
    for stage, ranks in enumerate(ranks_by_stage):
        if len(ranks) > 2 or any((ranks[0] in other) != (ranks[-1] in other) for other in ranks_by_stage):
            rule = (
                f"{layout.schedule} has stage {stage} on ranks {', '.join(map(str, ranks))}, which do not hold the same stages"
            )
            remedy = "Give a stage to one rank, or to two that hold the same stages."
            problems.append(Problem("layout.schedule", rule, remedy))
            break
    if problems:
        raise SpecError(problems)
    return schedule
