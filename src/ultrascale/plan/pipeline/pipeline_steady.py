"""Step time of many micro-batches from that of few: between filling and draining, a pipeline repeats the same round.

A schedule of more micro-batches is one of fewer with more rounds in the middle. A round depends on earlier actions only through
the end times of a few, one or two per rank:

    filling   simulated action by action
    rounds    simulated until all end times grow by the same L in a round; n more rounds then add n L
    draining  simulated

Nothing is approximated. A round is a micro-batch (two where two streams meet), or
the group that an interleaved rank takes through its stages together. Schedules with all forward passes first need no lists: the
micro-batches of a stage follow one another, with one cumulative maximum each.

Baccelli et al., Synchronization and Linearity, 1992.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.layouts import Floats, Indices, distinct
from ultrascale.plan.pipeline.pipeline_board import release_board
from ultrascale.plan.pipeline.pipeline_program import Program, program_of
from ultrascale.plan.pipeline.play import StageSeconds, as_columns, priced_board, step_seconds
from ultrascale.schedules.build import DEFAULT_VIRTUAL_STAGES, is_file

ROUNDS = 3
"""Rounds in the short schedule, if micro-batches come in rounds: filling and draining take less than two."""
FEW = 6
"""Micro-batches in the short schedule of other builders, beyond filling and draining, from which rounds are detected."""
SAME = 1e-13
"""Tolerance, relative to the time so far, within which all end times must grow by the same amount in a steady state."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of a short schedule."""

    program: Program
    first: int
    """First wave of the first round."""
    waves: int
    """Number of waves in a round."""
    inside: int
    """Number of rounds in the short schedule."""
    carried: Indices
    """Earlier actions that a round reads, as (negative) indices relative to the round's first action."""

    @property
    def actions(self) -> int:
        """Number of actions in a round."""
        first, beyond = (self.program.waves[self.first + more][0] for more in (0, self.waves))
        return beyond - first


def long_step_seconds(
    name: str, pp: int, num_micro_batches: int, seconds: StageSeconds, *, virtual_stages: int | None = None
) -> Floats:
    """`plan.pipeline.play.step_seconds` of a schedule, [cases], simulating no round twice. In full: files, and orders whose
    rounds are no such rounds (`rounds_of`)."""
    known = None if is_file(name) else SCHEDULES[name]
    if known and known.forward_first:
        return _forward_first(seconds, pp, num_micro_batches, known.stages_a_rank(virtual_stages or DEFAULT_VIRTUAL_STAGES))
    few, size = few_micro_batches(name, pp, num_micro_batches) if known else (num_micro_batches, 1)
    rounds = rounds_of(name, pp, few, virtual_stages) if few < num_micro_batches else None
    if rounds is None:
        return step_seconds(program_of(name, pp, num_micro_batches, virtual_stages), seconds)
    return _with_more_rounds(rounds, (num_micro_batches - few) // size, seconds)


def few_micro_batches(name: str, pp: int, num_micro_batches: int) -> tuple[int, int]:
    """Number of micro-batches of the short schedule with the same rounds, and of one round."""
    known = SCHEDULES[name]
    if known.in_rounds:  # what is over makes as many rounds longer by one
        over = num_micro_batches % pp
        return (over + ROUNDS) * pp + over, pp
    few = known.warm_up * pp + FEW
    return few + (num_micro_batches - few) % known.copies, known.copies


@lru_cache(maxsize=128)
def rounds_of(name: str, pp: int, num_micro_batches: int, virtual_stages: int | None) -> Rounds | None:
    """Repeating rounds of a schedule: their start and length, and the earlier actions that each reads. None if no round is like
    the next, a round ends within a wave, or it reads what is older than the round before (twice 1F1B's warm-up)."""
    program = program_of(name, pp, num_micro_batches, virtual_stages)
    known = SCHEDULES[name]
    waves = 2 * program.num_stages if known.in_rounds else known.round_actions
    actions, numbers = waves * pp, np.arange(len(program.codes))
    needs = np.column_stack([program.previous, program.sources])
    signatures = np.column_stack([np.where(needs < len(needs), needs - numbers[:, None], 1), program.codes, program.borders])
    repeats = (signatures[:-actions] == signatures[actions:]).all(axis=1)
    breaks = np.flatnonzero(np.concatenate([[True], ~repeats, [True]]))
    longest = int(np.diff(breaks).argmax())
    begins, ends = int(breaks[longest]), int(breaks[longest + 1]) - 1 + actions
    starts = np.array([first for first, _ in program.waves])
    first = int(np.searchsorted(starts, begins))
    begins = int(starts[first])
    inside = (ends - begins) // actions
    boundaries = begins + actions * np.arange(inside + 1)
    if inside < 1 or not np.array_equal(starts[first : first + waves * inside + 1 : waves], boundaries):
        return None
    assert all(nodes[-1] >= boundaries[-1] for nodes in program.node_of), "a rank has nothing to drain"
    read = [needs[boundary:][needs[boundary:] < boundary] - boundary for boundary in boundaries]
    carried = distinct(np.concatenate(read) + begins) - begins
    return Rounds(program, first, waves, inside, carried) if carried[0] >= -min(actions, begins) else None


def _with_more_rounds(rounds: Rounds, more: int, seconds: StageSeconds) -> Floats:
    """Step time, [cases], with `more` rounds inserted. Each is simulated in the place of the first."""
    program, board = rounds.program, priced_board(rounds.program, seconds)
    ends, begin = board.ends, rounds.first
    number, actions = program.waves[begin][0], rounds.actions
    board.play(0, begin)
    after = ends[number + rounds.carried]
    for remaining in reversed(range(rounds.inside + more)):
        ends[number + rounds.carried] = before = after
        board.play(begin, begin + rounds.waves)
        after = ends[number + actions + rounds.carried]
        if _in_rhythm(before, after):
            after += remaining * (after - before)
            break
    drains = number + actions * rounds.inside
    ends[drains + rounds.carried] = after
    board.play(begin + rounds.waves * rounds.inside)
    last = ends[drains:-1].max(axis=0)
    release_board(program, board)
    return last


def _in_rhythm(before: Floats, after: Floats) -> bool:
    """True if all end times, [carried, cases], grew by the same amount in each case."""
    longer = after - before
    return bool((np.ptp(longer, axis=0) <= SAME * after.max(axis=0)).all())


def _forward_first(seconds: StageSeconds, pp: int, num_micro_batches: int, virtual_stages: int) -> Floats:
    """Step time if every stage runs all micro-batches forward, then all backward, one stage of a rank after the other."""
    stages = pp * virtual_stages
    names = (seconds.forward, seconds.input_gradient, seconds.weight_gradient)
    forward, inputs, weights = (as_columns(cost, stages) for cost in names)
    send = as_columns(seconds.send, stages - 1)
    cases = max(column.shape[1] for column in (forward, inputs, weights, send))
    free, arrive = np.zeros((pp, cases)), np.zeros((num_micro_batches, cases))
    for stage in range(stages):
        lag = send[stage - 1] * (pp > 1) if stage else 0.0
        arrive = _in_turn(arrive, free[stage % pp], lag, forward[stage], seconds.receives_block)
        free[stage % pp] = arrive[-1]
    arrive = np.zeros((num_micro_batches, cases))
    for stage in reversed(range(stages)):
        lag = send[stage] * (pp > 1) if stage < stages - 1 else 0.0
        arrive = _in_turn(arrive, free[stage % pp], lag, inputs[stage] + weights[stage], seconds.receives_block)
        free[stage % pp] = arrive[-1]
    return free.max(axis=0)


def _in_turn(sent: Floats, free: Floats, lag: Floats | float, cost: Floats, receives_block: bool) -> Floats:
    """End times, [micro-batches, cases], of a stage's passes of `cost` [cases] each, from the times at which they were sent."""
    cost, lag = (cost + lag, 0.0) if receives_block else (cost, lag)
    turn = np.arange(len(sent))[:, None] * cost
    start = sent + (lag - turn)
    np.maximum(start[0], free, out=start[0])
    return np.maximum.accumulate(start, axis=0) + (turn + cost)
