"""What a rank of a pipeline holds at the moments of its passes, counted from its own list of actions: blocks, not bytes.

A row of counts is a moment of one pass; bytes of a layout's blocks times it are what the rank holds then. Rows that another
has more of everything than are left out, so that few are left, and they are the same for all layouts with one pipeline:

    whole     micro-batches between F and B (or I), by type of block
    waits     between I and W
    excess    of a block at work: forward, backward, or in I
    hidden    messages: the next one, already under way; that of the gradient until the stage is done; those that wait for the
              first stage's W

    zb-h1 on 4 ranks, rank 2, a block a stage: before I 2 whole + 2 waiting; before W 1 whole + 3 waiting

A type is a kind of block in one way of recomputing it, so that "every second block" is what it is on every rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import le
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.cut_backward import CUTTING
from ultrascale.plan.time.stages import stages_of_ranks
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.build import lists_of_ranks
from ultrascale.schedules.sharded import FINISHES

Floats = NDArray[np.float64]
BY_TYPE = ("whole", "waits", "forward", "backward", "input")
"""Columns of each type of block: how often it is held, held for W, at work in F, in B, in I (what it needs beyond `whole`)."""
APART = ("embedding", "head", "hidden", "pending")
"""Columns after those; the last is the share of the rank's stages whose gradients of I wait for W to reduce them."""
PASSES = (
    "forward", "head forward", "head backward", "backward last", "backward next", "reduction", "backward first", "outside",
    "input last", "input first", "weights",
)  # fmt: skip
"""Moments of passes: `plan.columns.rank_moments` says what is there beside activations."""
WHEN = ("first", "between", "last")
"""Before the first backward pass of a step has ended on the rank, when there are no summed gradients yet; after it; and in the
last backward pass of a stage, when those of ZeRO 0 and 1 are reduced."""
FORWARD_FIRST = ("afab", "breadth-first")


Found = dict[tuple[str, str], set[tuple[float, ...]]]
"""Counts by `WHEN` and by moment."""


class Pipeline(NamedTuple):
    """All that decides what ranks hold."""

    schedule: str
    pp: int
    virtual_stages: int
    num_micro_batches: int
    chunks: tuple[int, ...]
    """Blocks of each stage."""
    types: tuple[int, ...]
    """Of every block."""
    num_types: int


class Loads(NamedTuple):
    """Rows of counts, [rows, columns], and where those of each moment of the first, the middle and the last rank begin, by
    `WHEN`."""

    rows: Floats
    begins: NDArray[np.intp]
    """[3 x WHEN x PASSES]"""
    never: NDArray[np.bool_]
    """[3 x WHEN x PASSES]: the rank has no such moment, and its row is zeros."""

    @property
    def pending(self) -> Floats:
        """[3, PASSES]: the most of that share."""
        return np.maximum.reduceat(self.rows[:, -1], self.begins).reshape(3, len(WHEN), len(PASSES)).max(axis=1)

    def most(self, num_bytes: Floats) -> Floats:
        """[3, WHEN, PASSES, layouts] of the bytes of each column, [columns, layouts]; minus infinity where that never is."""
        found = np.maximum.reduceat(self.rows @ num_bytes, self.begins, axis=0)
        found[self.never] = -np.inf
        return found.reshape(3, len(WHEN), len(PASSES), -1)


def enough_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> int:
    """So few that hold as much: from there on a schedule repeats itself. Where all go forward first one stands for all."""
    if pp == 1:
        return min(num_micro_batches, 2)
    if schedule in FORWARD_FIRST:
        return 1
    if schedule == "interleaved":
        rounds = max(1, num_micro_batches // pp)
        size, larger = divmod(num_micro_batches, rounds)  # as `schedules.interleaved.rounds`
        return num_micro_batches if rounds < 4 else 3 * size + min(larger, 3)
    few = {"1f1b": pp + 1, "zb-h1": 2 * pp + 1, "zb-v": 2 * pp + 2, "dualpipe": 4 * pp}.get(schedule, 3 * pp + 1)
    return num_micro_batches if num_micro_batches <= few else few + num_micro_batches % 2 * (schedule == "dualpipe")


@lru_cache(maxsize=4096)
def loads_of(pipeline: Pipeline) -> Loads:
    """What the ranks of a known schedule hold; `num_micro_batches` of `enough_micro_batches`."""
    name, pp = pipeline.schedule, pipeline.pp
    if pp == 1:
        return loads_of_actions([accumulate(pipeline.num_micro_batches, 0)], pipeline)
    virtual = pipeline.virtual_stages if name in ("interleaved", "breadth-first") else None
    held = stages_of_ranks(len(pipeline.chunks), pp, name)
    sorts = _sorts(held, _types_of_stages(pipeline), cuts=name in CUTTING)
    some = tuple(sorted({rank for ranks in sorts for rank in ranks}))
    return _loads(sorts, _lists(name, pp, pipeline.num_micro_batches, virtual, some), pipeline)


@lru_cache(maxsize=2)
def _lists(
    name: str, pp: int, num_micro_batches: int, virtual_stages: int | None, ranks: tuple[int, ...]
) -> dict[int, list[Action]]:
    return lists_of_ranks(name, pp, num_micro_batches, virtual_stages, ranks)


def loads_of_actions(schedule: Sequence[Sequence[Action]], pipeline: Pipeline) -> Loads:
    """The same of lists of actions."""
    held = [sorted({part.stage for action in row for part in action.parts}) for row in schedule]
    cuts = any(part.kind is Kind.INPUT_GRADIENT for action in schedule[-1] for part in action.parts)
    return _loads(_sorts(held, _types_of_stages(pipeline), cuts=cuts), schedule, pipeline)


def _loads(
    sorts: Sequence[Sequence[int]], actions: Mapping[int, Sequence[Action]] | Sequence[Sequence[Action]], pipeline: Pipeline
) -> Loads:
    """Of the lists of the ranks of three sorts."""
    stages = _types_of_stages(pipeline)
    columns = len(BY_TYPE) * pipeline.num_types + len(APART)
    rows, begins, never, total = [], [], [], 0
    for ranks in sorts:
        found: Found = {(when, name): set() for when in WHEN for name in PASSES}
        for rank in ranks:
            for key, some in _Rank(stages, pipeline.num_types).play(actions[rank]).items():
                found[key] |= some
        for some in found.values():
            best = _highest(some, columns)
            begins.append(total)
            never.append(not some)
            rows.append(best)
            total += len(best)
    return Loads(np.concatenate(rows), np.array(begins, dtype=np.intp), np.array(never))


def _types_of_stages(pipeline: Pipeline) -> list[tuple[int, ...]]:
    ends = [sum(pipeline.chunks[:stage]) for stage in range(len(pipeline.chunks) + 1)]
    return [pipeline.types[start:end] for start, end in pairwise(ends)]


def _sorts(held: Sequence[Sequence[int]], stages: Sequence[tuple[int, ...]], *, cuts: bool) -> list[list[int]]:
    """The first rank, some between, and the last, of what each holds. Between: of the ranks with the same blocks the first,
    which has most micro-batches under way, and where backward passes are cut the last, which has most waiting for W."""
    alike: dict[object, list[int]] = {}
    for rank in range(1, len(held) - 1):
        alike.setdefault(tuple(stages[stage] for stage in held[rank]), []).append(rank)
    between = sorted({rank for ranks in alike.values() for rank in (ranks[0], ranks[-1] if cuts else ranks[0])})
    return [[0], between, [len(held) - 1] if len(held) > 1 else []]


def _highest(rows: Iterable[tuple[float, ...]], columns: int) -> Floats:
    """Those that no other has at least as much of everything as; a row of zeros if there are none."""
    table = np.array(sorted(rows, reverse=True)).reshape(-1, columns)
    if len(table) < 2:
        return table if len(table) else np.zeros((1, columns))
    below = np.logical_and.reduce(table[:, None] <= table[None], axis=2)
    return table[np.count_nonzero(below, axis=1) == 1]  # below itself alone


class _Rank:
    """A rank's actions played: blocks held, by stage, stages with the same blocks together."""

    def __init__(self, stages: Sequence[tuple[int, ...]], num_types: int):
        self.stages, self.num_types, self.last = stages, num_types, len(stages) - 1
        self.whole: dict[int, int] = {}
        self.waits: dict[int, int] = {}
        self.alike: dict[int, int] = {}
        """By stage, the first that holds the same and is neither end."""
        self.counts: list[int] = []
        """For each of those, micro-batches held whole, then those that wait; last the stages of which some wait."""
        self.when = WHEN[0]
        self.found: Found = {(when, name): set() for when in WHEN for name in PASSES}
        self._noted: defaultdict[tuple[str, int, str], list[tuple[int, ...]]] = defaultdict(list)

    def play(self, actions: Sequence[Action]) -> Found:
        """By moment the counts of all different ones."""
        parts = [part for action in actions for part in action.parts]
        held = sorted({part.stage for part in parts})
        known: dict[object, int] = {}
        self.alike = {
            stage: known.setdefault((self.stages[stage], stage == 0, stage == self.last), len(known)) for stage in held
        }
        self.whole, self.waits, self.counts = dict.fromkeys(held, 0), dict.fromkeys(held, 0), [0] * (2 * len(known) + 1)
        left, later = Counter(part.stage for part in parts if part.kind in FINISHES), WHEN[0]
        for number, part in enumerate(parts):
            finishes = part.kind in FINISHES
            left[part.stage] -= finishes
            self.when = WHEN[2] if finishes and not left[part.stage] else later
            ahead = parts[number + 1].kind if number + 1 < len(parts) else None
            DO[part.kind](self, part.stage, ahead)
            later = WHEN[1] if finishes else later
        return self.found

    def _hold(self, stage: int, whole: int, waits: int) -> None:
        """More micro-batches, or fewer."""
        self.whole[stage] += whole
        self.counts[2 * self.alike[stage]] += whole
        if waits:
            self.waits[stage] += waits
            self.counts[2 * self.alike[stage] + 1] += waits
            self.counts[-1] = sum(count > 0 for count in self.waits.values())

    def _forward(self, stage: int, ahead: Kind | None) -> None:
        self._hold(stage, 1, 0)
        if (ahead is Kind.FORWARD and stage < self.last) or self._is_known("F", stage):
            return
        blocks = self.stages[stage]
        for kind, place in {kind: place for place, kind in enumerate(blocks)}.items():
            self._note("forward", forward=kind, gone=blocks[place + 1 :])
        if stage == self.last:
            self._note("head forward", head=-1)

    def _backward(self, stage: int, ahead: Kind | None) -> None:
        if not self._is_known("B", stage):
            self._back(stage, "backward")
        self._hold(stage, -1, 0)

    def _input_gradient(self, stage: int, ahead: Kind | None) -> None:
        if stage == 0:  # nobody waits for it: W does all, and the gradient that came is held until then
            self._hold(stage, 0, 1)
            return
        if not self._is_known("I", stage):
            self._back(stage, "input")
        self._hold(stage, -1, 1)

    def _weight_gradient(self, stage: int, ahead: Kind | None) -> None:
        if stage > 0 and not self._is_known("W", stage):
            self._note("weights")
        self._hold(stage, 0, -1)
        if stage == 0:
            self._backward(stage, ahead)

    def _back(self, stage: int, work: str) -> None:
        """The moments of a B or an I."""
        blocks, of_head = list(self.stages[stage]), -1 if stage == self.last else 0
        if of_head:
            self._note("head backward", head=of_head)
        if work == "backward" and (stage == 0 or 0 not in self.whole):
            self._note("outside", head=of_head, gone=blocks)
        if not blocks:
            return
        last, beside = blocks[-1], work == "input"
        if beside:
            self._note("input last", head=of_head, input=last)
        else:
            self._note("backward last", head=of_head, backward=last)
            if len(blocks) > 1:
                self._note("backward next", head=of_head, gone=(last,), backward=blocks[-2])
            self._note("reduction", head=of_head, gone=(last,))
        if beside:
            waits = blocks[1:]  # what the first leaves is in its own excess
            self._note("input first", head=of_head, gone=waits, left=waits, input=blocks[0], own=stage)
        else:
            self._note("backward first", head=of_head, gone=blocks[1:], backward=blocks[0])

    def _is_known(self, kind: str, stage: int) -> bool:
        """Whether there was such a pass with at least as much of everything."""
        noted, now = self._noted[kind, self.alike[stage], self.when], tuple(self.counts)
        if any(all(map(le, now, other)) for other in reversed(noted)):
            return True
        noted.append(now)
        return False

    def _note(
        self, name: str, *, forward: int | None = None, backward: int | None = None, input: int | None = None, head: int = 0,
        gone: Sequence[int] = (), left: Sequence[int] = (), own: int = 0,
    ) -> None:  # fmt: skip
        """A moment: all that is held, without blocks that are `gone`, with those `left` for W (of stage `own`) and a block at
        work."""
        kinds = self.num_types
        row = [0.0] * (len(BY_TYPE) * kinds + len(APART))
        for stage, count in self.whole.items():
            waits = self.waits[stage] if stage else 0
            if count or waits:
                for kind in self.stages[stage]:
                    row[kind] += count
                    row[kinds + kind] += waits
        for kind in gone:
            row[kind] -= 1
        for kind in left:
            row[kinds + kind] += 1
        for number, kind in enumerate((forward, backward, input)):
            if kind is not None:
                row[(2 + number) * kinds + kind] += 1
        apart = len(BY_TYPE) * kinds
        row[apart] = self.whole.get(0, 0)
        row[apart + 1] = self.whole.get(self.last, 0) + head
        messages = 0 if self.last == 0 else 1 + (name not in ("forward", "head forward", "weights") and not head)
        row[apart + 2] = self.waits.get(0, 0) + messages
        pending = {stage for stage, count in self.waits.items() if count and stage} | ({own} if own else set())
        row[apart + 3] = len(pending) / len(self.waits)
        self.found[self.when, name].add(tuple(row))


DO = {
    Kind.FORWARD: _Rank._forward, Kind.BACKWARD: _Rank._backward, Kind.INPUT_GRADIENT: _Rank._input_gradient,
    Kind.WEIGHT_GRADIENT: _Rank._weight_gradient,
}  # fmt: skip
