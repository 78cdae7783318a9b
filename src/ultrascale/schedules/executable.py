"""Dependencies between actions: checks that lists can be executed, and orders them. Simulator and executor build on it.

Dependencies: on a rank, every action waits for the previous one. Across ranks, F of a stage waits for F of the previous stage,
and B or I of a stage for B or I of the next, for the same micro-batch. Nothing waits for W.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ultrascale.description.problems import Problem, SpecError
from ultrascale.schedules.actions import Action, Kind

Schedule = Sequence[Sequence[Action]]


class Dependencies(NamedTuple):
    """Dependencies of a schedule's actions, which are numbered consecutively, rank by rank."""

    ranks: list[int]
    sources: list[int]
    """[action]: the action whose result it needs; the number of actions if none."""
    other_sources: list[int]
    """[action]: the same for its overlapped pass."""
    waves: list[list[int]]
    """Actions that can be executed together, each needing only those of earlier waves."""


def check_executable(schedule: Schedule) -> None:
    """Raise SpecError, naming rank and action, unless every stage passes every micro-batch once each way and nothing deadlocks.

    Stages and micro-batches are counted from 0 without gaps; B, or I and W, are on the rank of their F and after it.
    """
    problems = _repeated_or_misplaced(schedule)
    if not problems:
        problems = _missing(schedule)
    if problems:
        raise SpecError(problems)
    dependencies_of(schedule)


def dependencies_of(schedule: Schedule) -> Dependencies:
    """Dependencies and an execution order. Raises SpecError naming each rank's first action that can never start."""
    num_stages, count = shape_of(schedule)
    needs, other_needs, gives = _slots(schedule, num_stages, count)
    actions = len(needs)
    givers = [actions + 1] * (2 * num_stages * count) + [actions]  # never produced; slot -1: no input needed
    for number, slot in gives:
        givers[slot] = number
    sources, other_sources = [givers[slot] for slot in needs], [givers[slot] for slot in other_needs]
    waves, position = _waves([len(row) for row in schedule], sources, other_sources)
    stuck = [(rank, index) for rank, index in enumerate(position) if index < len(schedule[rank])]
    if stuck:
        raise SpecError([_deadlock(schedule, rank, index, num_stages) for rank, index in stuck])
    ranks = [rank for rank, row in enumerate(schedule) for _ in row]
    return Dependencies(ranks, sources, other_sources, waves)


def shape_of(schedule: Schedule) -> tuple[int, int]:
    """Number of stages and of micro-batches: one more than the highest that occur."""
    parts = [part for row in schedule for action in row for part in action.parts]
    return 1 + max(part.stage for part in parts), 1 + max(part.micro_batch for part in parts)


def ranks_of_stages(schedule: Schedule) -> list[list[int]]:
    """Ranks that hold each stage: one, or two where the weights have two copies (DualPipe)."""
    holders: list[set[int]] = [set() for _ in range(shape_of(schedule)[0])]
    for rank, row in enumerate(schedule):
        for action in row:
            for part in action.parts:
                holders[part.stage].add(rank)
    return [sorted(ranks) for ranks in holders]


def _slots(schedule: Schedule, num_stages: int, count: int) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """For each action the result it needs and the one its overlapped pass needs (-1: none); and the pairs (action, result
    produced).

    Results are numbered, forward ones first, then gradients.
    """
    forward, weight = Kind.FORWARD, Kind.WEIGHT_GRADIENT
    gradients, last = num_stages * count, num_stages - 1

    needs, other_needs, gives = list[int](), list[int](), list[tuple[int, int]]()

    def needed(part: Action) -> int:
        """Result that `part` needs; records the one it produces."""
        kind, micro_batch, stage = part[:3]
        if kind is weight:
            return -1
        slot = stage * count + micro_batch
        if kind is forward:
            gives.append((len(needs), slot))
            return slot - count if stage else -1
        gives.append((len(needs), gradients + slot))
        return -1 if stage == last else gradients + slot + count

    for row in schedule:
        for action in row:
            other_needs.append(-1 if action.overlapped_with is None else needed(action.overlapped_with))
            needs.append(needed(action))
    return needs, other_needs, gives


def _waves(lengths: list[int], sources: list[int], other_sources: list[int]) -> tuple[list[list[int]], list[int]]:
    """Waves, and how far each rank got. A wave holds at most one action per rank: its next, if it can start."""
    starts = [0, *accumulate(lengths)]
    positions, ends = starts[:-1], starts[1:]
    done = bytearray(len(sources) + 2)
    done[len(sources)] = True  # the source of actions without dependencies
    waves: list[list[int]] = []
    running = [rank for rank, length in enumerate(lengths) if length]
    while True:
        wave = [
            (rank, positions[rank])
            for rank in running
            if done[sources[positions[rank]]] and done[other_sources[positions[rank]]]
        ]
        if not wave:
            return waves, [position - start for position, start in zip(positions, starts, strict=False)]
        waves.append([number for _, number in wave])
        for rank, number in wave:
            done[number] = True
            positions[rank] = number + 1
        running = [rank for rank in running if positions[rank] < ends[rank]]


def _deadlock(schedule: Schedule, rank: int, position: int, num_stages: int) -> Problem:
    waits = []
    for part in schedule[rank][position].parts:
        if part.kind is Kind.FORWARD and part.stage:
            waits.append((part.stage - 1, "F", part.micro_batch))
        elif part.kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and part.stage < num_stages - 1:
            waits.append((part.stage + 1, "BI", part.micro_batch))
    waited_for = " and ".join(_describe_pass(schedule, *wait) for wait in waits)
    rule = f"can never start: it waits for {waited_for}, which waits in turn for rank {rank}: a deadlock"
    remedy = f"Let rank {rank} first do what the other ranks wait for: move this action further back."
    return Problem(_name(rank, position, schedule[rank][position]), rule, remedy)


def _describe_pass(schedule: Schedule, stage: int, kinds: str, micro_batch: int) -> str:
    """A pass as cell and position: `1B0 (rank 1, action 3)`."""
    for rank, row in enumerate(schedule):
        for position, action in enumerate(row):
            for part in action.parts:
                if (part.stage, part.micro_batch) == (stage, micro_batch) and part.kind.value in kinds:
                    return f"{stage}{part.kind.value}{micro_batch} (rank {rank}, action {position})"
    return f"{stage}{kinds[0]}{micro_batch} (on no rank)"


def _repeated_or_misplaced(schedule: Schedule) -> list[Problem]:
    """Actions that occur twice, on another rank than their F, or before it; W before I."""
    problems: list[Problem] = []
    seen: dict[tuple[str, int, int], int] = {}
    earlier = {"B": "F", "I": "F", "W": "I"}
    twice = {"F": "F", "B": "BI", "I": "BI", "W": "WB"}
    for rank, row in enumerate(schedule):
        for position, action in enumerate(row):
            for part in action.parts:
                kind, where = part.kind.value, (part.stage, part.micro_batch)
                name = _name(rank, position, part)
                if any((other, *where) in seen for other in twice[kind]):
                    problems.append(Problem(name, "has been done before", "Every stage passes a micro-batch once each way."))
                elif kind != "F" and seen.get((earlier[kind], *where)) != rank:
                    first = _describe_pass(schedule, part.stage, earlier[kind], part.micro_batch)
                    rule = f"needs what {first} keeps, which is not earlier on the same rank"
                    remedy = f"Put it behind {first.split()[0]}, in the list of that rank."
                    problems.append(Problem(name, rule, remedy))
                seen[(kind, *where)] = rank
    return problems


def _missing(schedule: Schedule) -> list[Problem]:
    """Passes that are on no rank. The backward pass may be B, or I and W."""
    num_stages, count = shape_of(schedule)
    done = {(p.kind.value, p.stage, p.micro_batch) for row in schedule for action in row for p in action.parts}
    problems = []
    for stage in range(num_stages):
        for k in range(count):
            kinds = {kind for kind in "FBIW" if (kind, stage, k) in done}
            lacks = "F" if "F" not in kinds else "B, or I and W," if kinds == {"F"} else "W" if kinds == {"F", "I"} else ""
            if lacks:
                rule = f"micro-batch {k} does not pass stage {stage} once each way: {lacks} is on no rank"
                problems.append(Problem(f"{stage}{lacks[0]}{k}", rule, "Add it to the list of the rank that holds the stage."))
    return problems


def _name(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, action {position} ({action.cell})"
