"""Steps of many micro-batches from steps of few: once a pipeline is in its rhythm, all rounds take the same time.

A schedule of m + n micro-batches is the one of m with more rounds in the middle. Let every action of a stretch in the middle,
longer than any action looks back, come just L after the same action a round before. Starts are maxima of sums of what was
earlier, so the next round comes L later too, and so does everything behind any number of rounds put in here: each adds L to the
step, exactly.

Even stages find the rhythm at once. Where stages differ a little, fast ranks drift ahead for as many rounds as their head start
lasts, and the whole step may have to be played; the shorter tries cost less than half of it. 1F1B, the usual schedule, needs
neither: `plan.pipeline_levels`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.pipeline import Floats, StageSeconds, as_columns, play_many, step_seconds
from ultrascale.plan.pipeline_levels import level_step_seconds
from ultrascale.plan.pipeline_program import Program, program_of
from ultrascale.schedules.actions import Kind

STEADY = ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
"""Schedules with a rhythm. Messages make it one of pp micro-batches of a stream: all but one of them pay for theirs."""
SPAN_RANKS = 2
"""Micro-batches of a stream that an action looks back at most, as a multiple of the ranks: a rank holds no more at once."""
SAME = 1e-12
"""Of the step: times that differ by less are the same."""


def long_step_seconds(
    name: str, pp: int, num_micro_batches: int, seconds: StageSeconds, *, virtual_stages: int | None = None
) -> Floats:
    """`plan.pipeline.step_seconds` of a schedule known by name, [cases], playing only as many micro-batches as it takes."""
    if name == "1f1b" and num_micro_batches >= pp and not seconds.receives_block:
        return _levels(seconds, pp, num_micro_batches)
    streams = 2 if name == "dualpipe" else 1
    size = streams * pp
    ragged = num_micro_batches % (pp if name == "interleaved" else streams) > 0  # rounds, or streams, that differ
    span = SPAN_RANKS * pp
    played = streams * 3 * span + 2 * size
    while name in STEADY and not ragged and (played := played + (num_micro_batches - played) % size) <= num_micro_batches // 2:
        program = program_of(name, pp, played, virtual_stages)
        ends = play_many(program, seconds)
        step = ends.max(axis=0)
        middle = ends[_lanes_of(name, pp, played, virtual_stages, streams, span)]  # [lanes, micro-batches of a stream, cases]
        later = middle[:, size // streams :] - middle[:, : -(size // streams)]
        least, most = later.min(axis=(0, 1)), later.max(axis=(0, 1))
        if np.all(most - least <= SAME * step):
            return step + least * ((num_micro_batches - played) // size)
        played *= 4
    return step_seconds(program_of(name, pp, num_micro_batches, virtual_stages), seconds)


def _levels(seconds: StageSeconds, pp: int, num_micro_batches: int) -> Floats:
    forward, inputs, weights = (
        as_columns(cost, pp) for cost in (seconds.forward, seconds.input_gradient, seconds.weight_gradient)
    )
    send, backward = as_columns(seconds.send, pp - 1), inputs + weights
    cases = max(column.shape[1] for column in (forward, backward, send))
    forward, backward, send = (np.broadcast_to(column, (len(column), cases)) for column in (forward, backward, send))
    return level_step_seconds(forward, backward, send, num_micro_batches)


@lru_cache(maxsize=128)
def _lanes_of(
    name: str, pp: int, num_micro_batches: int, virtual_stages: int | None, streams: int, span: int
) -> NDArray[np.intp]:
    return _lanes(program_of(name, pp, num_micro_batches, virtual_stages), streams, span)


def _lanes(program: Program, streams: int, span: int) -> NDArray[np.intp]:
    """[lanes, micro-batches]: numbers of the actions of one kind, stage and stream, but the first and last `span` of it."""
    numbers = np.full((len(Kind), program.num_stages, program.num_micro_batches), -1, dtype=np.intp)
    rows = {kind: row for row, kind in enumerate(Kind)}
    for actions, nodes in zip(program.schedule, program.node_of, strict=True):
        for action, node in zip(actions, nodes.tolist(), strict=True):
            for part in action.parts:
                numbers[rows[part.kind], part.stage, part.micro_batch] = node
    lanes = numbers.reshape(-1, program.num_micro_batches // streams)[:, span:-span]
    there = lanes >= 0
    assert (there.all(axis=1) == there.any(axis=1)).all(), "in the middle a stage does the same with every micro-batch"
    return lanes[there.all(axis=1)]
