"""Number of blocks whose activations a pipeline rank holds at the moments of its passes, counted from its list of actions.

A row of counts is a moment of one pass; a layout's bytes per block times the row are the bytes that the rank holds then.
Dominated rows (another has at least as much of everything) are dropped; the few others are shared by all layouts with the same
pipeline. Columns:

    whole     micro-batches between F and B (or I), by type of block
    waits     micro-batches between I and W
    excess    additional bytes of a running block: forward, backward, or in I
    hidden    messages: the next one, already being received; the gradient's until the stage is done; those that wait for
              the first stage's W

    zb-h1 on 4 ranks, rank 2, a block a stage: before I 2 whole + 2 waiting; before W 1 whole + 3 waiting

A type is a kind of block with one recomputation option, so that "every second block" is correct on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.layouts import Bools, Floats, Indices
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Action, Kind, splits_backward
from ultrascale.schedules.build import actions_of_ranks

BY_TYPE = ("whole", "waits", "forward", "backward", "input")
"""Columns of each type of block: number held, held for W, and running in F, B or I (bytes beyond `whole`)."""
OTHER_COLUMNS = ("embedding", "head", "hidden", "shared", "summing", "summed", "pending")
"""Further columns. Shared: tensors that all blocks of a stage read, once per stage and micro-batch. Summing, summed: fraction
of the rank's stages with gradients of some, and of all micro-batches. Pending: fraction of stages whose gradients from I wait
for W to reduce them."""
SUMS = slice(-3, -1)
"""The columns `summing` and `summed`."""
PASSES = (
    "forward", "head forward", "head backward", "backward last", "backward next", "reduction", "backward first", "outside",
    "input last", "input first", "weights first", "weights last",
)  # fmt: skip
"""Moments of passes; `plan.columns.rank_moments` has the other memory at each."""
WHEN = ("first", "between", "last")
"""Time in the step. First: before the rank's first backward pass ends, without summed gradients. Between: after it. Last: in
the last backward pass of a stage, which reduces gradients in ZeRO 0 and 1."""

FORWARD, BACKWARD, INPUT, WEIGHT = (ord(kind.value) for kind in Kind)
"""Kinds of passes in an array."""


class PipelineShape(NamedTuple):
    """Everything that determines the activations that ranks hold."""

    schedule: str
    pp: int
    virtual_stages: int
    num_micro_batches: int
    chunks: tuple[int, ...]
    """Blocks of each stage."""
    types: tuple[int, ...]
    """Type of every block."""
    num_types: int
    sums_in_input: bool = False
    """True if gradients are summed from the first I on: with experts, whose weight gradients are computed in I."""


class Loads(NamedTuple):
    """Rows of counts, [rows, columns], with the first row of each (rank sort, `WHEN`, `PASSES`)."""

    rows: Floats
    begins: Indices
    """Index of the first row, [3 x WHEN x PASSES]."""
    absent: Bools
    """True where the rank has no such moment, and its row is zeros, [3 x WHEN x PASSES]."""

    @property
    def pending(self) -> Floats:
        """Maximum of the column `pending`, [3, PASSES]."""
        return np.maximum.reduceat(self.rows[:, -1], self.begins).reshape(3, len(WHEN), len(PASSES)).max(axis=1)

    def most(self, num_bytes: Floats, sums: Floats | None = None) -> Floats:
        """Largest bytes at each moment, [3, WHEN, PASSES, layouts], for the bytes of each column, [columns, layouts]; minus
        infinity for moments that do not occur. `sums`: bytes of the columns `SUMS` by rank, [3, 2, layouts]."""
        live = self.rows @ num_bytes
        if sums is not None:
            first, second = self.begins[len(self.begins) // 3 :: len(self.begins) // 3]
            parts = slice(0, first), slice(first, second), slice(second, None)
            for part, rank_sums in zip(parts, sums, strict=True):
                live[part] += self.rows[part, SUMS] @ rank_sums
        peaks = np.maximum.reduceat(live, self.begins, axis=0)
        peaks[self.absent] = -np.inf
        return peaks.reshape(3, len(WHEN), len(PASSES), -1)


@lru_cache(maxsize=4096)
def loads_of(pipeline: PipelineShape) -> Loads:
    """Loads of the ranks of a known schedule."""
    name, pp = pipeline.schedule, pipeline.pp
    if pp == 1:
        return loads_of_actions([accumulate(pipeline.num_micro_batches, 0)], pipeline)
    known = SCHEDULES[name]
    stages_of_ranks = known.stages_of_ranks(pp, len(pipeline.chunks))
    sorts = _sorts(stages_of_ranks, _types_of_stages(pipeline), splits=bool(known.splits_backward))
    chosen_ranks = tuple(sorted({rank for ranks in sorts for rank in ranks}))
    return _loads(sorts, _lists(name, pp, pipeline.num_micro_batches, pipeline.virtual_stages, chosen_ranks), pipeline)


@lru_cache(maxsize=2)
def _lists(
    name: str, pp: int, num_micro_batches: int, virtual_stages: int | None, ranks: tuple[int, ...]
) -> dict[int, list[Action]]:
    return actions_of_ranks(name, pp, num_micro_batches, virtual_stages, ranks)


def loads_of_actions(schedule: Sequence[Sequence[Action]], pipeline: PipelineShape) -> Loads:
    """Loads of a schedule given as lists of actions."""
    stages_of_ranks = [sorted({part.stage for action in row for part in action.parts}) for row in schedule]
    splits = splits_backward(schedule[-1])
    return _loads(_sorts(stages_of_ranks, _types_of_stages(pipeline), splits=splits), schedule, pipeline)


def _loads(
    sorts: Sequence[Sequence[int]],
    actions: Mapping[int, Sequence[Action]] | Sequence[Sequence[Action]],
    pipeline: PipelineShape,
) -> Loads:
    """Loads of the first, the middle and the last ranks (`sorts`), from their lists of actions."""
    lists = [[part for action in actions[rank] for part in action.parts] for ranks in sorts for rank in ranks]
    of_rank = np.repeat(np.arange(len(sorts)), [len(ranks) for ranks in sorts])
    rows, rank, moment = _moments(_passes(lists, _types_of_stages(pipeline), pipeline.sums_in_input), pipeline.num_types)
    moments = len(WHEN) * len(PASSES)
    groups, every = of_rank[rank] * moments + moment, np.arange(len(sorts) * moments)
    absent = np.bincount(groups, minlength=len(every)) == 0
    rows, groups = np.concatenate([rows, np.zeros((absent.sum(), rows.shape[1]))]), np.concatenate([groups, every[absent]])
    order = np.lexsort((*-rows.T[::-1], groups))
    best = order[~_is_dominated(rows[order], groups[order])]
    return Loads(rows[best], np.searchsorted(groups[best], every), absent)


def _types_of_stages(pipeline: PipelineShape) -> list[tuple[int, ...]]:
    ends = [sum(pipeline.chunks[:stage]) for stage in range(len(pipeline.chunks) + 1)]
    return [pipeline.types[start:end] for start, end in pairwise(ends)]


def _sorts(stages_of_ranks: Sequence[Sequence[int]], stages: Sequence[tuple[int, ...]], *, splits: bool) -> list[list[int]]:
    """The first rank, some inner ranks and the last, as lists. Inner: of the ranks with the same blocks, the first, which has
    most micro-batches in flight; with split backward passes also the last, which has most waiting for W; if micro-batches
    enter at both ends, the innermost."""
    alike: dict[object, list[int]] = {}
    for rank in range(1, len(stages_of_ranks) - 1):
        alike.setdefault(tuple(stages[stage] for stage in stages_of_ranks[rank]), []).append(rank)
    chosen_ranks = ((ranks[0], ranks[len(ranks) // 2], ranks[-1]) if splits else ranks[:1] for ranks in alike.values())
    between = sorted({rank for ranks in chosen_ranks for rank in ranks})
    return [[0], between, [len(stages_of_ranks) - 1] if len(stages_of_ranks) > 1 else []]


def _is_dominated(rows: Floats, groups: Indices) -> Bools:
    """True for rows that an earlier row of their group equals or exceeds in every column, [rows]; groups are in order."""
    starts = np.searchsorted(groups, groups)
    earlier = np.arange(len(rows)) - starts
    row = np.repeat(np.arange(len(rows)), earlier)
    earlier_row = np.arange(len(row)) + np.repeat(starts - earlier.cumsum() + earlier, earlier)
    for column in rows.T:
        as_much = column[row] <= column[earlier_row]
        row, earlier_row = row[as_much], earlier_row[as_much]
    return np.bincount(row, minlength=len(rows)) > 0


class _Passes(NamedTuple):
    """Passes of some ranks, [passes], without those that another pass dominates."""

    does: Indices
    """Kind, one of `FORWARD`, `BACKWARD`, `INPUT` and `WEIGHT`."""
    rank: Indices
    """Index in the list of ranks."""
    sort: Indices
    """Index of its stage in `alike`."""
    when: Indices
    """Index into `WHEN`."""
    alone: Bools
    """True if no other micro-batch of the stage waits for W."""
    counts: Floats
    """[passes, 2 x sorts + 3]: micro-batches held whole by sort of stage, then waiting by sort of stage; number of stages with
    waiting ones; number of stages with gradients of some, and of all micro-batches."""
    alike: Mapping[tuple[tuple[int, ...], bool, bool], int]
    """Sorts of stages: (types of blocks, is first, is last), with their index."""
    stages: Indices
    """Number of stages that each rank holds, [ranks]."""
    has_first: Bools
    """True for ranks that hold the first stage, [ranks]."""


def _passes(lists: Sequence[Sequence[Action]], stages: Sequence[tuple[int, ...]], sums_in_input: bool) -> _Passes:
    """Passes of some ranks, whose lists are replayed one after the other: each ends with nothing held, so one cumulative sum
    covers all."""
    lengths, last = [len(passes) for passes in lists], len(stages) - 1
    kinds, _, of_stages, *_ = zip(*chain.from_iterable(lists), strict=True)
    kind = np.frombuffer("".join([pass_kind._value_ for pass_kind in kinds]).encode(), dtype=np.uint8)
    stage, rank = np.array(of_stages), np.repeat(np.arange(len(lists)), lengths)
    starts, every = np.searchsorted(rank, rank), np.arange(len(kind))
    held, cell = np.unique(rank * len(stages) + stage, return_inverse=True)
    alike: dict[tuple[tuple[int, ...], bool, bool], int] = {}
    sorts = [
        alike.setdefault((stages[stage_number], stage_number == 0, stage_number == last), len(alike))
        for stage_number in (held % len(stages)).tolist()
    ]
    sort = np.array(sorts)[cell]

    # No stage needs the first stage's I: W does the whole backward pass, and the incoming gradient is held until then.
    begins, splits, postponed = kind == FORWARD, (kind == INPUT) & (stage > 0), (kind == WEIGHT) & (stage == 0)
    whole = 1 * begins - ((kind == BACKWARD) | splits | postponed)
    waits = 1 * (kind == INPUT) - (kind == WEIGHT)
    order, depth = np.argsort(cell, kind="stable"), np.empty_like(waits)
    depth[order] = waits[order].cumsum()
    waiting = 1 * ((waits > 0) & (depth == 1)) - ((waits < 0) & (depth == 0))
    finishes = np.flatnonzero((kind == BACKWARD) | (kind == WEIGHT))
    in_input = splits if sums_in_input else splits & (stage == last) & (not stages[last])  # a stage with only the head too
    adds = np.flatnonzero((kind == BACKWARD) | (kind == WEIGHT) | in_input)
    first, final = np.zeros((2, len(kind)), dtype=np.int64)
    first[adds[np.unique(cell[adds], return_index=True)[1]]] = 1
    final[finishes[::-1][np.unique(cell[finishes[::-1]], return_index=True)[1]]] = 1
    before = np.stack([first, final]).cumsum(axis=1) - [first, final]
    begun, done = before - before[:, starts]

    # Counts after F, and before other passes.
    counts = np.zeros((len(kind), 2 * len(alike) + 3))
    counts[every, sort], counts[every, len(alike) + sort], counts[:, -3] = whole, waits, waiting
    counts = counts.cumsum(axis=0)
    counts[every, sort] -= np.where(begins, 0, whole)
    counts[every, len(alike) + sort] -= np.where(postponed, 0, waits)
    counts[:, -3] -= np.where(postponed, 0, waiting)
    counts[:, -2:] = np.stack([begun - done, done], axis=1)

    # Of consecutive forward passes only the last; and no pass that an earlier one dominates.
    repeated = np.append((kind[1:] == FORWARD) & (rank[1:] == rank[:-1]), False) & begins & (stage < last)
    kept = np.flatnonzero(~repeated & (splits | (kind != INPUT)))
    does, when = np.where(postponed, BACKWARD, kind), np.where(final > 0, 2, begun > 0)
    keys = ((rank * len(alike) + sort) * 128 + does) * len(WHEN) + when
    kept = kept[np.argsort(keys[kept], kind="stable")]
    table = np.column_stack([keys, counts])[kept]
    known = {line: place for place, line in reversed([*enumerate(table.view(f"V{table.strides[0]}").ravel().tolist())])}
    kept = kept[sorted(known.values())]
    kept = kept[~_is_dominated(counts[kept], keys[kept])]
    has_first = np.bincount(rank[stage == 0], minlength=len(lists)) > 0
    return _Passes(
        does[kept], rank[kept], sort[kept], when[kept], depth[kept] == 1, counts[kept], alike, np.bincount(held // len(stages)),
        has_first,
    )  # fmt: skip


def _moments(passes: _Passes, num_types: int) -> tuple[Floats, Indices, Indices]:
    """Rows of counts, [rows, columns], of the moments of passes; for each the index of the rank, and an index into `WHEN` x
    `PASSES`."""
    alike, apart = [*passes.alike], len(BY_TYPE) * num_types
    keys = [*zip(passes.does.tolist(), passes.sort.tolist(), passes.has_first[passes.rank].tolist(), strict=True)]
    changes, where = list[tuple[int, tuple[int, ...]]](), dict[tuple[int, int, bool], range]()
    for key in dict.fromkeys(keys):
        more = _changes(chr(key[0]), *alike[key[1]], has_first=key[2], num_types=num_types)
        where[key] = range(len(changes), len(changes) + len(more))
        changes += more
    pass_of = np.repeat(np.arange(len(keys)), [len(where[key]) for key in keys])
    change_of = np.array([number for key in keys for number in where[key]])
    name, change = (np.array(part)[change_of] for part in zip(*changes, strict=True))
    held = np.zeros((2 * len(alike) + 3, apart + len(OTHER_COLUMNS)))
    for number, (blocks, is_first, is_last) in enumerate(alike):
        for block in blocks:
            held[number, block] += 1
            held[len(alike) + number, num_types + block] += not is_first
        held[number, apart : apart + 4] = is_first, is_last, 0, bool(blocks)
        held[len(alike) + number, apart + 2] = is_first
    held[[-3, -2, -1], [-1, -3, -2]] = 1
    rows, rank = passes.counts[pass_of] @ held, passes.rank[pass_of]
    rows[:, -1] += (name == PASSES.index("input first")) & passes.alone[pass_of]
    rows[:, -1] -= rows[:, apart + 2] > 0
    rows += change
    rows[:, -3:] /= passes.stages[rank, None]
    return rows, rank, passes.when[pass_of] * len(PASSES) + name


@lru_cache(maxsize=4096)
def _changes(
    does: str, blocks: tuple[int, ...], is_first: bool, is_last: bool, *, has_first: bool, num_types: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Moments of a pass of a stage with these blocks, each with its difference from the held counts. `has_first`: the rank
    holds the first stage too."""
    changes: list[tuple[int, tuple[int, ...]]] = []
    apart, of_head, numbers = len(BY_TYPE) * num_types, -1 if is_last else 0, Counter(blocks).items

    def note(
        name: str, *, head: int = 0, gone: Iterable[tuple[int, int]] = (), left: Iterable[tuple[int, int]] = (),
        emptied: bool = False, **at_work: int,
    ) -> None:  # fmt: skip
        """Add a moment without blocks that are `gone` (`emptied`: all of the stage), with those `left` for W, and one
        running."""
        row = [0] * (apart + len(OTHER_COLUMNS))
        for block, number in gone:
            row[block] -= number
        for block, number in left:
            row[num_types + block] += number
        for work, block in at_work.items():
            row[BY_TYPE.index(work) * num_types + block] += 1
        row[apart + 1], row[apart + 3] = head, -emptied
        if not (is_first and is_last):
            row[apart + 2] = 1 + (not name.startswith(("forward", "head forward", "weights")) and not head)
        changes.append((PASSES.index(name), tuple(row)))

    if does == "F":
        for block, place in {block: place for place, block in enumerate(blocks)}.items():
            note("forward", forward=block, gone=Counter(blocks[place + 1 :]).items())
        if is_last:
            note("head forward", head=-1)
        return changes
    if does == "W":
        note("weights first")
        note("weights last", left=((block, -number) for block, number in numbers()))
        return changes
    if is_last:
        note("head backward", head=of_head)
    if does == "B" and (is_first or not has_first):
        note("outside", head=of_head, gone=numbers(), emptied=bool(blocks))
    if not blocks:
        return changes
    first, end, after_first = blocks[0], blocks[-1], Counter(blocks[1:]).items()
    if does == "I":
        note("input last", head=of_head, input=end)
        # The first block's tensors kept for W are in its excess.
        note("input first", head=of_head, gone=after_first, left=after_first, input=first)
        return changes
    note("backward last", head=of_head, backward=end)
    if len(blocks) > 1:
        note("backward next", head=of_head, gone=((end, 1),), backward=blocks[-2])
    note("reduction", head=of_head, gone=((end, 1),), emptied=len(blocks) == 1)
    note("backward first", head=of_head, gone=after_first, backward=first)
    return changes
