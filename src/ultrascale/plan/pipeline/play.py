"""Pipeline schedules played with prices: when every action starts and ends, how long a step takes, how long each rank waits.

An action starts when the one before it on its rank has ended and what it needs has arrived. The order is a property of the
schedule alone, so it is worked out once (`Program`, cached by name) and played with any prices: one case as plain floats, or
many at once, a column a case.

    end = max(end of the one before, end of its source + send) + seconds     messages travel beside computing
    end = max(end of the one before, end of its source) + send + seconds     `receives_block`: the receiver does nothing else

A sender never waits for its message: what it waits for is the answer. Any prices may be unequal; for these rules all is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.plan.pipeline.pipeline_activations import InFlight, in_flight, peak_activation_bytes, rank_in_flight
from ultrascale.plan.pipeline.pipeline_board import Board, acquire_board, release_board
from ultrascale.plan.pipeline.pipeline_program import Program, compile_schedule, program_of
from ultrascale.schedules.executable import Schedule

__all__ = [
    "InFlight", "Program", "StageSeconds", "Timeline", "as_columns", "compile_schedule", "in_flight", "peak_activation_bytes",
    "play", "play_many", "program_of", "simulate", "step_seconds",
]  # fmt: skip
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in every stage: arrays [stages], or [stages, cases]. A number is the same for all stages."""

    forward: ArrayLike
    input_gradient: ArrayLike
    """Recomputation counts here: the gradients cannot start before it."""
    weight_gradient: ArrayLike
    """The two are halves of a backward pass in one."""
    send: ArrayLike = 0.0
    """Seconds of a message from stage s to s+1 or back, between different ranks: [stages - 1], or [stages - 1, cases]."""
    forward_communication: ArrayLike = 0.0
    """Part of `forward` that is communication, which a pair's backward can hide."""
    backward_communication: ArrayLike = 0.0
    """Part of `input_gradient` that is communication, which a pair's forward can hide."""
    receives_block: bool = False
    split_input: ArrayLike = 0.0
    """Seconds that I, and W, take beyond their halves of an unsplit backward pass (below 0: less), where passes are split."""
    split_weight: ArrayLike = 0.0


@dataclass(frozen=True)
class Timeline:
    """A step as it was played. Seconds from its start."""

    schedule: Schedule
    start: list[list[float]]
    """[rank][action]: when it begins to compute."""
    end: list[list[float]]
    step_seconds: float
    busy_seconds: list[float] = field(default_factory=list)
    """[rank]: computing."""

    @property
    def bubble_seconds(self) -> list[float]:
        """[rank]: not computing: waiting for other ranks or for messages."""
        return [self.step_seconds - busy for busy in self.busy_seconds]

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they do not compute."""
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
        """[rank]: activations that live at once."""
        return [rank_in_flight(row) for row in self.schedule]


def simulate(schedule: Schedule, seconds: StageSeconds) -> Timeline:
    """Play a schedule with one case of prices, exactly. Raises SpecError if it deadlocks."""
    return play(compile_schedule(schedule), seconds)


def play(program: Program, seconds: StageSeconds) -> Timeline:
    """Play a compiled schedule with one case of prices, exactly."""
    durations = duration_table(program, seconds)[program.codes, 0]
    ends = np.array(_ends_of_case(program, durations, seconds))
    return Timeline(
        schedule=program.schedule,
        start=[(ends[nodes] - durations[nodes]).tolist() for nodes in program.node_of],
        end=[ends[nodes].tolist() for nodes in program.node_of],
        step_seconds=float(ends.max()),
        busy_seconds=[float(durations[nodes].sum()) for nodes in program.node_of],
    )


def step_seconds(program: Program, seconds: StageSeconds) -> Floats:
    """Length of a step for many cases at once: [cases]."""
    return play_many(program, seconds).max(axis=0)


def play_many(program: Program, seconds: StageSeconds) -> Floats:
    """When every action ends, for many cases at once: [actions + 1, cases], the last row zeros. Wave by wave."""
    board = priced_board(program, seconds)
    board.play()
    ends = board.ends.copy()
    release_board(program, board)
    return ends


def priced_board(program: Program, seconds: StageSeconds) -> Board:
    """A board with the prices of stages as those of actions."""
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


def _ends_of_case(program: Program, durations: Floats, seconds: StageSeconds) -> list[float]:
    """Seconds at which every action ends, of one case, in plain floats: without NumPy's cost for every wave."""
    send = _send_table(program, seconds)[program.borders, 0]
    waits = np.zeros_like(send) if seconds.receives_block else send
    work = durations + send.max(axis=1) if seconds.receives_block else durations
    ends = [0.0] * (len(durations) + 1)
    rows = zip(program.previous.tolist(), *program.sources.T.tolist(), *waits.T.tolist(), work.tolist(), strict=True)
    for number, (previous, source, other, wait, other_wait, duration) in enumerate(rows):
        start = ends[previous]
        if (arrived := ends[source] + wait) > start:
            start = arrived
        if (arrived := ends[other] + other_wait) > start:
            start = arrived
        ends[number] = start + duration
    return ends


def duration_table(program: Program, seconds: StageSeconds) -> Floats:
    """[4 x stages + pairs, cases]: seconds of F, B, I, W of every stage, then of the pairs.

    A pair computes for as long as both and communicates for as long as both; each hides the other, and neither gets shorter.
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
    """[stages, cases]: seconds of a message across each border; the last row, zeros, crosses none."""
    send = as_columns(seconds.send, program.num_stages - 1)
    return np.concatenate([send, np.zeros((1, send.shape[1]))])


def as_columns(value: ArrayLike, count: int) -> Floats:
    """`value` as [count, cases]."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim < 2:
        array = np.broadcast_to(array, (count,))[:, None]
    assert array.shape[0] == count, f"{array.shape[0]} rows for {count} stages or borders"
    return array
