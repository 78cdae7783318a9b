"""Buffers for the simulation of a program: arrays, and each wave's views of them, made once and reused for other durations.

A wave is a few actions, and a step has thousands of waves, so slicing arrays would cost more than the sums. Here a wave takes
four NumPy calls (six if passes have a second source) on existing views.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ultrascale.plan.layouts import Floats, Indices
from ultrascale.plan.pipeline.pipeline_program import Program, Wave

KEPT = 2
"""Boards that a program keeps for its last number of cases: threads that plan concurrently take one each."""


class _Move(NamedTuple):
    """Views of the arrays for one wave."""

    sources: Indices
    """[sources of an action, wave]"""
    lags: Floats
    arrived: Floats
    """Buffer for the times at which sources have arrived, [sources of an action, wave, ...]."""
    first: Floats
    """Part of `arrived` for the first source."""
    other: Floats | None
    previous: Indices | None
    """None if they are consecutive: `before` is then a view of them."""
    before: Floats
    work: Floats
    ends: Floats


class Board:
    """Arrays for a number of cases, and views of all waves. Not safe for concurrent threads."""

    def __init__(self, program: Program, work: Floats, lags: Floats, ends: Floats):
        self.work, self.lags, self.ends = work, lags, ends
        """Seconds of every action [actions, cases]; of messages from its sources [1, or 2 with pairs, actions, cases]; its end
        time [actions + 1, cases], the last row zeros."""
        self._moves = [self._move(wave) for wave in program.moves]

    def _move(self, wave: Wave) -> _Move:
        numbers, previous, sources = wave
        arrived = np.empty((*sources.shape, *self.ends.shape[1:]))
        follows = isinstance(previous, slice)
        return _Move(
            sources, self.lags[:, numbers], arrived, arrived[0], arrived[1] if len(arrived) > 1 else None,
            None if follows else previous, self.ends[previous] if follows else np.empty_like(arrived[0]),
            self.work[numbers], self.ends[numbers],
        )  # fmt: skip

    def play(self, begin: int = 0, end: int | None = None) -> None:
        """Fill `ends` for the actions of the waves from `begin` to `end`; earlier ends and the last row must be filled."""
        take, add, maximum = self.ends.take, np.add, np.maximum
        for sources, lags, arrived, first, other, previous, before, work, ends in self._moves[begin:end]:
            take(sources, 0, arrived, "clip")
            add(arrived, lags, out=arrived)
            if other is not None:
                maximum(first, other, out=first)
            if previous is not None:
                take(previous, 0, before, "clip")
            maximum(first, before, out=first)
            add(first, work, out=ends)


def acquire_board(program: Program, cases: int) -> Board:
    """A board for so many cases: a released one, or a new one."""
    try:  # another thread may take it first
        while (board := program.boards.pop()).work.shape[1] != cases:
            pass
        return board
    except IndexError:
        pass
    actions, sources = len(program.codes), 2 if program.pairs else 1
    return Board(program, np.empty((actions, cases)), np.empty((sources, actions, cases)), np.zeros((actions + 1, cases)))


def release_board(program: Program, board: Board) -> None:
    """Keep a board for reuse."""
    if len(program.boards) < KEPT:
        program.boards.append(board)
