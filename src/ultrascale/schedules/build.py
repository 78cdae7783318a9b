"""Schedules by name: which there are, what each needs, and which stages a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ultrascale.schedules.actions import Action
from ultrascale.schedules.afab import afab
from ultrascale.schedules.breadth_first import breadth_first
from ultrascale.schedules.custom import read_schedule
from ultrascale.schedules.dualpipe import dualpipe
from ultrascale.schedules.dualpipe_v import dualpipe_v
from ultrascale.schedules.executable import ranks_of_stages
from ultrascale.schedules.interleaved import interleaved
from ultrascale.schedules.one_f_one_b import one_f_one_b
from ultrascale.schedules.zb_h1 import zb_h1
from ultrascale.schedules.zb_v import zb_v
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.units import count_of


class Named(NamedTuple):
    """A schedule known by name."""

    function: Callable[..., list[list[Action]]]
    virtual_stages: int | None
    """Stages of the model cut for one rank; None: any number, and the function takes it."""
    title: str


NAMES = {
    "afab": Named(afab, 1, "all forward, all backward (GPipe)"),
    "1f1b": Named(one_f_one_b, 1, "one forward, one backward"),
    "interleaved": Named(interleaved, None, "interleaved 1F1B"),
    "breadth-first": Named(breadth_first, None, "breadth-first"),
    "zb-h1": Named(zb_h1, 1, "zero bubble H1"),
    "zb-v": Named(zb_v, 2, "zero bubble V"),
    "dualpipe": Named(dualpipe, 1, "DualPipe, two copies of the weights"),
    "dualpipe-v": Named(dualpipe_v, 2, "DualPipeV"),
}
DEFAULT_VIRTUAL_STAGES = 2

ALONE = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
"""Schedules whose ranks' lists do not need the others'."""


def build_schedule(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None = None) -> list[list[Action]]:
    """One list of actions for each of `pp` ranks, of a schedule of `NAMES` or of a CSV or JSON file.

    `virtual_stages`: stages a rank; None: what the schedule has, 2 where it can have any.
    Raises SpecError if the name is unknown, or the numbers do not suit the schedule or the file.
    """
    if name not in NAMES:
        return _from_file(name, pp, num_micro_batches)
    if problems := schedule_problems(name, pp, num_micro_batches, virtual_stages):
        raise SpecError(problems)
    function = NAMES[name].function
    if NAMES[name].virtual_stages is None:
        function = partial(function, virtual_stages=virtual_stages or DEFAULT_VIRTUAL_STAGES)
    return function(pp, num_micro_batches)


def lists_of_ranks(
    name: str, pp: int, num_micro_batches: int, virtual_stages: int | None, ranks: Sequence[int]
) -> dict[int, list[Action]]:
    """Those of some ranks of a schedule of `NAMES`, without the others' where they can be made alone."""
    if name not in ALONE:
        every = build_schedule(name, pp, num_micro_batches, virtual_stages)
        return {rank: every[rank] for rank in ranks}
    options = {"virtual_stages": virtual_stages or DEFAULT_VIRTUAL_STAGES} if NAMES[name].virtual_stages is None else {}
    return dict(zip(ranks, NAMES[name].function(pp, num_micro_batches, ranks=ranks, **options), strict=True))


def schedule_problems(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None = None) -> list[Problem]:
    """What is wrong with these numbers for the schedule `name` of `NAMES`; keys as in `Layout`."""
    own = NAMES[name].virtual_stages
    found: list[Problem] = []
    for key, value in (("pp", pp), ("micro_batches", num_micro_batches), ("virtual_stages", virtual_stages)):
        if value is not None and value < 1:
            found.append(Problem(key, f"must be at least 1, is {value}", "Give a whole number from 1 on."))
    if own is not None and virtual_stages not in (None, own):
        rule = f"the schedule {name} has {own} stage{'s' * (own > 1)} a rank, not {virtual_stages}"
        found.append(Problem("virtual_stages", rule, f"Set {own}, or take interleaved or breadth-first."))
    if name == "dualpipe" and pp % 2:
        rule = f"DualPipe pairs rank r with rank pp-1-r, so pp must be even, is {pp}"
        found.append(Problem("pp", rule, f"Take {pp + 1}, or the schedule dualpipe-v, which takes any."))
    return found


def stages_of_ranks(name: str, pp: int, virtual_stages: int | None = None) -> list[list[int]]:
    """The stages that each of `pp` ranks holds, whatever the number of micro-batches. Raises SpecError as `build_schedule`."""
    schedule = read_schedule(Path(name)) if is_file(name) else build_schedule(name, pp, 2, virtual_stages)
    held = ranks_of_stages(schedule)
    return [[stage for stage, ranks in enumerate(held) if rank in ranks] for rank in range(len(schedule))]


def is_file(name: str) -> bool:
    """Whether `name` is that of a file of actions."""
    return Path(name).suffix in (".csv", ".json")


def _from_file(name: str, pp: int, num_micro_batches: int) -> list[list[Action]]:
    if not is_file(name):
        raise SpecError(
            [Problem("schedule", f"there is no schedule {name!r}", f"Take {', '.join(NAMES)}, or a .csv or .json file.")]
        )
    actions = read_schedule(Path(name))
    count = 1 + max(part.micro_batch for row in actions for action in row for part in action.parts)
    found = []
    if len(actions) != pp:
        found.append(Problem("pp", f"{name} has {count_of(len(actions), 'rank')}, not {pp}", f"Set pp to {len(actions)}."))
    if count != num_micro_batches:
        has = count_of(count, "micro-batch")
        rule, remedy = f"{name} has {has}, not {num_micro_batches}", f"Make a step {has} of a rank, or write another file."
        found.append(Problem("micro_batches", rule, remedy))
    if found:
        raise SpecError(found)
    return actions
