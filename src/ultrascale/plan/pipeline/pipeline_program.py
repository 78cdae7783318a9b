"""A schedule compiled for simulation: the dependencies of its actions as arrays, independent of durations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ultrascale.plan.layouts import Indices
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.build import build_schedule, is_file
from ultrascale.schedules.executable import Dependencies, Schedule, dependencies_of, shape_of

if TYPE_CHECKING:
    from ultrascale.plan.pipeline.pipeline_board import Board

TABLE_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""Order of the rows of a table of durations: all stages of each of these kinds, then the pairs."""


class Wave(NamedTuple):
    """Actions that are simulated together."""

    numbers: slice
    previous: Indices | slice
    """A slice if the indices are consecutive."""
    sources: Indices
    """[1, or 2 in a schedule with pairs, wave]"""


@dataclass(frozen=True)
class Program:
    """A schedule compiled for simulation: actions numbered in waves, each of which depends only on earlier ones."""

    schedule: Schedule
    num_stages: int
    num_micro_batches: int
    node_of: list[Indices]
    """[rank][position]: the action's number."""
    previous: Indices
    """[actions]: number of the previous action on the rank; if there is none, the number of actions (its end time is 0)."""
    sources: Indices
    """[actions, 2]: numbers of the actions whose results it needs, with the same convention."""
    borders: Indices
    """[actions, 2]: the border between stages (s to s+1 is s) that a source's result crosses; stages - 1 if it crosses none."""
    codes: Indices
    """[actions]: row of the table of durations."""
    pairs: list[tuple[int, int]]
    """Stages (of F, of B) of the table's rows after the 4 x stages of single passes."""
    waves: list[tuple[int, int]]
    """First action, and last + 1, of every wave."""

    @cached_property
    def moves(self) -> list[Wave]:
        """The waves, as index arrays."""
        sources = self.sources.T[: 2 if self.pairs else 1]
        return [
            Wave(numbers, _in_a_row(self.previous[numbers]), sources[:, numbers].copy())
            for numbers in (slice(*wave) for wave in self.waves)
        ]

    @cached_property
    def pair_stages(self) -> Indices:
        """[2, pairs]: the stages of F and of B."""
        return np.array(self.pairs, dtype=np.intp).reshape(-1, 2).T

    @cached_property
    def boards(self) -> list[Board]:
        """Boards of earlier simulations, for reuse (`plan.pipeline.pipeline_board`)."""
        return []


def program_of(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None = None) -> Program:
    """Compiled schedule by name (cached) or from a file. Raises SpecError if the numbers do not suit it."""
    if is_file(name):
        return compile_schedule(build_schedule(name, pp, num_micro_batches, virtual_stages))
    return _program_of(name, pp, num_micro_batches, virtual_stages)


@lru_cache(maxsize=128)
def _program_of(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None) -> Program:
    return compile_schedule(build_schedule(name, pp, num_micro_batches, virtual_stages))


def compile_schedule(schedule: Schedule) -> Program:
    """Make a schedule ready to be played. Raises SpecError if it deadlocks."""
    dependencies = dependencies_of(schedule)
    num_stages, num_micro_batches = shape_of(schedule)
    actions = [action for row in schedule for action in row]
    by_wave = np.array([number for wave in dependencies.waves for number in wave], dtype=np.intp)
    number_of = np.empty(len(actions) + 1, dtype=np.intp)
    number_of[by_wave] = np.arange(len(actions))
    number_of[-1] = len(actions)
    starts = np.cumsum([0, *(len(row) for row in schedule)])
    previous = np.arange(-1, len(actions) - 1)
    previous[starts[:-1][np.diff(starts) > 0]] = -1  # the first of a rank follows nothing
    sources = np.array([dependencies.sources, dependencies.other_sources], dtype=np.intp).T
    codes, pairs = _codes(actions, num_stages)
    edges = np.cumsum([0, *map(len, dependencies.waves)]).tolist()
    return Program(
        schedule, num_stages, num_micro_batches, [number_of[a:b] for a, b in pairwise(starts)],
        number_of[previous[by_wave]], number_of[sources[by_wave]],
        _borders(actions, dependencies, sources, num_stages)[by_wave],
        codes[by_wave], pairs, list(pairwise(edges)),
    )  # fmt: skip


def _in_a_row(numbers: Indices) -> Indices | slice:
    """A slice, if that is what the numbers are: NumPy then copies nothing."""
    first = int(numbers[0])
    return slice(first, first + len(numbers)) if (np.diff(numbers) == 1).all() else numbers.copy()


def _borders(actions: list[Action], dependencies: Dependencies, sources: Indices, num_stages: int) -> Indices:
    """[actions, 2]: the border between stages that each source's result crosses; stages - 1 if it stays on its rank."""
    behind = [action.stage - (action.kind is Kind.FORWARD) for action in actions]
    other = [0 if action.overlapped_with is None else action.overlapped_with.stage for action in actions]
    ranks = np.array([*dependencies.ranks, -1])
    comes = (sources < len(actions)) & (ranks[sources] != ranks[:-1, None])
    return np.where(comes, np.array([behind, other]).T, num_stages - 1)


def _codes(actions: list[Action], num_stages: int) -> tuple[Indices, list[tuple[int, int]]]:
    """[actions]: row of the table of durations; and the stages of its pairs."""
    base = {kind.value: number * num_stages for number, kind in enumerate(TABLE_KINDS)}
    rows = [base[action.kind._value_] + action.stage for action in actions]
    pairs: dict[tuple[int, int], int] = {}
    for number, action in enumerate(actions):
        if action.overlapped_with is not None:
            stages = action.stage, action.overlapped_with.stage
            rows[number] = len(base) * num_stages + pairs.setdefault(stages, len(pairs))
    return np.array(rows, dtype=np.intp), list(pairs)
