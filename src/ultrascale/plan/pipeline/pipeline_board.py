"""A place to play a program's waves in: arrays, and every wave's views of them, made once and kept for the next prices.

A wave is a few actions, and a step has thousands of waves: slicing an array is then dearer than adding one up. Here a wave is
four calls of NumPy (six where passes have a second source), each on views that are there already.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.pipeline.pipeline_program import Program, Wave

Floats = NDArray[np.float64]
KEPT = 2
"""Boards of a program that are kept, of its last number of cases: threads that plan at once take one each."""


class _Move(NamedTuple):
    """A wave's views."""

    sources: NDArray[np.intp]
    """[sources of an action, wave]"""
    lags: Floats
    arrived: Floats
    """Room for when what is needed has come, [sources of an action, wave, ...]."""
    first: Floats
    """Part of `arrived` for the first source."""
    other: Floats | None
    previous: NDArray[np.intp] | None
    """None where they are a row of numbers, which `before` is a view of."""
    before: Floats
    work: Floats
    ends: Floats


class Board:
    """Arrays for some number of cases, and the views of the waves from `begin` to `end`. Not for two threads at once."""

    def __init__(self, program: Program, work: Floats, lags: Floats, ends: Floats, begin: int = 0, end: int | None = None):
        self.work, self.lags, self.ends = work, lags, ends
        """Seconds of every action [actions, cases, ...]; on the way from its sources [1, or 2 with pairs, actions, cases, ...];
        when it ends [actions + 1, cases, ...], the last row zeros."""
        self._moves = [self._move(wave) for wave in program.moves[begin:end]]

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
        """Fill `ends` for the actions of these of the board's waves, from those before them and the last row."""
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
    """A board for so many cases: one that was given back, or a new one."""
    try:  # another thread may be quicker
        while (board := program.boards.pop()).work.shape[1] != cases:
            pass
        return board
    except IndexError:
        pass
    actions, sources = len(program.codes), 2 if program.pairs else 1
    return Board(program, np.empty((actions, cases)), np.empty((sources, actions, cases)), np.zeros((actions + 1, cases)))


def release_board(program: Program, board: Board) -> None:
    """Keep it for the next prices."""
    if len(program.boards) < KEPT:
        program.boards.append(board)
