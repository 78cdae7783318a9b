"""Simulation of pipeline schedules: start and end of every action, step time, idle time of each rank.

An action starts when the previous action on its rank has ended and its inputs have arrived. The order depends on the schedule
alone, so it is compiled once (`Program`, cached by name) and simulated with any durations, many cases at once as columns.

    end = max(end of the previous, end of its source + send) + seconds     messages overlap with compute
    end = max(end of the previous, end of its source) + send + seconds     `receives_block`: the receiver is blocked

A sender never waits for its message to arrive. Durations may differ by stage; under these rules the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ultrascale.plan.layouts import Floats
from ultrascale.plan.pipeline.pipeline_activations import InFlight, in_flight, peak_activation_bytes, rank_in_flight
from ultrascale.plan.pipeline.pipeline_board import Board, acquire_board, release_board
from ultrascale.plan.pipeline.pipeline_program import Program, compile_schedule, program_of
from ultrascale.schedules.executable import Schedule

__all__ = [
    "InFlight", "Program", "StageSeconds", "Timeline", "as_columns", "compile_schedule", "in_flight", "peak_activation_bytes",
    "play", "play_many", "program_of", "simulate", "step_seconds",
]  # fmt: skip


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in every stage: arrays [stages], or [stages, cases]. A number is the same for all stages."""

    forward: ArrayLike
    input_gradient: ArrayLike
    """Seconds of I, recomputation included: gradients cannot start before it."""
    weight_gradient: ArrayLike
    """Seconds of W; an unsplit backward pass takes the sum of both."""
    send: ArrayLike = 0.0
    """Seconds of a message from stage s to s+1 or back, between different ranks: [stages - 1], or [stages - 1, cases]."""
    forward_communication: ArrayLike = 0.0
    """Part of `forward` that is communication, which a pair's backward can hide."""
    backward_communication: ArrayLike = 0.0
    """Part of `input_gradient` that is communication, which a pair's forward can hide."""
    receives_block: bool = False
    split_input: ArrayLike = 0.0
    """Additional seconds of I (and `split_weight` of W) in split backward passes, over their halves of an unsplit one
    (negative: less)."""
    split_weight: ArrayLike = 0.0


@dataclass(frozen=True)
class Timeline:
    """Result of a simulated step. Seconds from its start."""

    schedule: Schedule
    start: list[list[float]]
    """[rank][action]: time at which it starts to compute."""
    end: list[list[float]]
    step_seconds: float
    busy_seconds: list[float] = field(default_factory=list)
    """[rank]: seconds of compute."""

    @property
    def bubble_seconds(self) -> list[float]:
        """[rank]: idle seconds, waiting for other ranks or messages."""
        return [self.step_seconds - busy for busy in self.busy_seconds]

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of all ranks' time."""
        return 1 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.step_seconds)

    def to_json(self, *, actions: bool = True) -> dict[str, Any]:
        """A JSON-able dictionary; with `actions`, each of them with its start and end."""
        ranks = []
        for rank, (row, busy, held) in enumerate(zip(self.schedule, self.busy_seconds, self.in_flight, strict=True)):
            about: dict[str, Any] = {
                "rank": rank, "stages": sorted(held.by_stage), "busy_seconds": busy,
                "bubble_seconds": self.bubble_seconds[rank], "in_flight": held.total, "in_flight_for_weights": held.waiting,
            }  # fmt: skip
            if actions:
                names = (action.cell for action in row)
                about["actions"] = [list(item) for item in zip(names, self.start[rank], self.end[rank], strict=True)]
            ranks.append(about)
        return {"step_seconds": self.step_seconds, "bubble_fraction": self.bubble_fraction, "ranks": ranks}

    @cached_property
    def in_flight(self) -> list[InFlight]:
        """[rank]: micro-batches in flight."""
        return [rank_in_flight(row) for row in self.schedule]


def simulate(schedule: Schedule, seconds: StageSeconds) -> Timeline:
    """Simulate a schedule with one case of durations. Raises SpecError if it deadlocks."""
    return play(compile_schedule(schedule), seconds)


def play(program: Program, seconds: StageSeconds) -> Timeline:
    """Simulate a compiled schedule with one case of durations."""
    durations, ends = duration_table(program, seconds)[program.codes, 0], play_many(program, seconds)[:, 0]
    return Timeline(
        schedule=program.schedule,
        start=[(ends[nodes] - durations[nodes]).tolist() for nodes in program.node_of],
        end=[ends[nodes].tolist() for nodes in program.node_of],
        step_seconds=float(ends.max()),
        busy_seconds=[float(durations[nodes].sum()) for nodes in program.node_of],
    )


def step_seconds(program: Program, seconds: StageSeconds) -> Floats:
    """Seconds of a step for many cases at once, [cases]."""
    return play_many(program, seconds).max(axis=0)


def play_many(program: Program, seconds: StageSeconds) -> Floats:
    """End times of every action for many cases at once, [actions + 1, cases], the last row zeros; computed wave by wave."""
    board = priced_board(program, seconds)
    board.play()
    ends = board.ends.copy()
    release_board(program, board)
    return ends


def priced_board(program: Program, seconds: StageSeconds) -> Board:
    """A board with the durations of all actions, from those of stages."""
    table, send = duration_table(program, seconds), _send_table(program, seconds)
    board = acquire_board(program, max(table.shape[1], send.shape[1]))
    if table.shape == (len(table), board.work.shape[1]):
        table.take(program.codes, 0, board.work, "clip")
    else:
        board.work[:] = table[program.codes]
    lags = send[program.borders.T[: len(board.lags)]]
    if seconds.receives_block:
        board.work += lags.max(axis=0)
    board.lags[:] = 0.0 if seconds.receives_block else lags
    return board


def duration_table(program: Program, seconds: StageSeconds) -> Floats:
    """[4 x stages + pairs, cases]: seconds of F, B, I, W of every stage, then of the pairs.

    A pair's compute is the sum of both passes', and so is its communication; the two overlap, and neither gets shorter.
    """
    count = program.num_stages
    names = (
        "forward", "input_gradient", "weight_gradient", "split_input", "split_weight", "forward_communication",
        "backward_communication",
    )  # fmt: skip
    columns = [as_columns(getattr(seconds, name), count) for name in names]
    if any(column.shape != columns[0].shape for column in columns):
        columns = np.broadcast_arrays(*columns)
    ahead, inputs, weights, more_input, more_weight, ahead_talk, back_talk = columns
    back = inputs + weights
    rows = [ahead, back, inputs + more_input, weights + more_weight]
    if program.pairs:
        f, b = program.pair_stages
        f_alone, b_alone, talk = ahead[f], back[b], ahead_talk[f] + back_talk[b]
        rows.append(np.maximum(np.maximum(f_alone + b_alone - talk, talk), np.maximum(f_alone, b_alone)))
    return np.concatenate(rows)


def _send_table(program: Program, seconds: StageSeconds) -> Floats:
    """[stages, cases]: seconds of a message between neighbouring stages; the last row, zeros, for none."""
    send = as_columns(seconds.send, program.num_stages - 1)
    return np.concatenate([send, np.zeros((1, send.shape[1]))])


def as_columns(value: ArrayLike, count: int) -> Floats:
    """`value` as [count, cases]."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim < 2:
        array = np.broadcast_to(array, (count,))[:, None]
    assert array.shape[0] == count, f"{array.shape[0]} rows for {count} stages or borders"
    return array
