"""Activations of a rank, for whole tables of layouts: what blocks save, how many micro-batches are in flight, and the peaks.

in flight     micro-batches between their forward and backward pass on a rank (`plan.pipeline_bounds`)
saved         of one micro-batch on a rank: its blocks, the embedding, the head
excess        what the block at work needs beyond what it saves, forward and backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.block_memory import (
    BlockMemory,
    Recompute,
    block_memory,
    dummy_gradient_bytes,
    embedding_memory,
    head_memory,
)
from ultrascale.plan.blocks import distinct_shapes, layer_kinds
from ultrascale.plan.layouts import RECOMPUTE, SCHEDULES, LayoutTable, distinct
from ultrascale.plan.pipeline_activations import rank_in_flight
from ultrascale.plan.pipeline_bounds import in_flight_stages
from ultrascale.plan.stages import Stages
from ultrascale.plan.workload import Workload
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.executable import Schedule
from ultrascale.spec.layout import OFFLOAD_LEFT
from ultrascale.spec.op_builders import without_fp8
from ultrascale.spec.work import Shape, block_work

Floats = NDArray[np.float64]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
FORWARD_FIRST = np.array([name in ("afab", "breadth-first") for name in SCHEDULES])
"""By number: schedules in which all losses are there before the first backward pass."""


@dataclass(frozen=True)
class RankActivations:
    """Bytes, [3, layouts] or what broadcasts to it: the first, a middle and the last rank of the pipeline."""

    waiting: Floats
    """Of the micro-batches in flight but the one at work."""
    current: Floats
    """Of the micro-batch at work, all blocks of its stage and what is before them."""
    saved: Floats
    """Of a block, the mean of those that are recomputed and those that are not."""
    last_saved: Floats
    """Of the last block, the first on the way back."""
    forward_excess: Floats
    """Of the block at work, beyond what it saves."""
    last_excess: Floats
    """Of the last block in its backward pass, beyond what it saved."""
    next_excess: Floats
    """Of the one before it."""
    first_backward: Floats
    """The backward pass of the first block, the last to run: with what it saved."""
    head_forward: Floats
    """Of the head and loss, with what they save."""
    head_backward: Floats
    embedding_saved: Floats
    embedding_backward: Floats
    of_blocks: Floats
    """What all blocks of a rank save of one micro-batch, wherever it is kept."""
    hidden: Floats
    """The residual stream, one tensor."""
    dummies: Floats
    """Gradients that nobody reads, kept for good; see `Stack.keeps_dummy_gradients`."""
    largest_tensor: Floats
    """Of all that a block makes."""


class Kept(NamedTuple):
    """What the actions of a schedule of one's own keep, of a table of one layout."""

    flight: Floats
    """As `in_flight`."""
    losses: int
    """Micro-batches between the loss and its backward pass, beside the one at work."""


def kept_by(schedule: Schedule, virtual_stages: int) -> Kept:
    """What `schedule` keeps, one list of actions for each rank; of the ranks between, the one that keeps most."""
    counts = [rank_in_flight(row).total / virtual_stages for row in schedule]
    flight = np.array([[counts[0]], [max(counts[1:-1], default=counts[0])], [counts[-1]]])
    last = max(part.stage for row in schedule for action in row for part in action.parts)
    return Kept(flight, max(_losses(row, last) for row in schedule) - 1)


def _losses(actions: Sequence[Action], last: int) -> int:
    """The most micro-batches on a rank that are past the forward pass of stage `last`, and not in its backward pass yet."""
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRADIENT: -1, Kind.WEIGHT_GRADIENT: 0}
    here = [steps[part.kind] for action in actions for part in action.parts if part.stage == last]
    return max(accumulate(here), default=0)


def rank_activations(
    workload: Workload, table: LayoutTable, stages: Stages, micro_batches: NDArray[np.int64], kept: Kept | None = None
) -> RankActivations:
    """The activations of every layout of `table`; `kept` for a table of one layout whose schedule is from a file."""
    shapes, shape_of = distinct_shapes(workload, table)
    plain, saved, (first, following, last) = (_told if table.modes else _by_layout)(workload, table, shapes, shape_of)
    head = _parts([head_memory(workload.model, shape, stack=workload.stack) for shape in shapes])[:, shape_of]
    embedding = _parts([embedding_memory(workload.model, shape, stack=workload.stack) for shape in shapes])[:, shape_of]
    hidden = np.array([s.outer_tokens * workload.model.hidden_size * s.itemsize for s in shapes], dtype=float)[shape_of]

    v = table.virtual_stages
    here = stages.layers
    if stages.kept_layers.any():  # blocks in bf16 beside those in fp8 are kinds of their own
        in_bf16 = [without_fp8(shape) for shape in shapes]
        kept_plain, kept_saved, kept_ends = (_told if table.modes else _by_layout)(workload, table, in_bf16, shape_of)
        plain, saved = np.concatenate([plain, kept_plain], axis=1), np.concatenate([saved, kept_saved])
        first, following, last = (
            np.concatenate(both, axis=1) for both in zip((first, following, last), kept_ends, strict=True)
        )
        here = np.concatenate([here - stages.kept_layers, stages.kept_layers], axis=1)
    there = here > 0
    of_blocks = (here * saved).sum(axis=1)
    flight = in_flight(table, micro_batches) if kept is None else kept.flight
    # Multi-token prediction goes through the same head, and its loss comes first: what it saves is there beside the other's.
    heads = workload.model.num_nextn_predict_layers
    earlier = np.where(FORWARD_FIRST[table.schedule] & (table.pp > 1), micro_batches - 1, 0)
    head_saved = (1 + heads) * head[0] * stages.has_head * (earlier if kept is None else kept.losses)
    if workload.stack.keeps_outputs:
        outputs = _logits(workload, shapes)[:, shape_of] * stages.has_head * np.where(table.pp > 1, micro_batches - 1, 0)
        head_saved = np.maximum(head_saved, outputs)
    before = embedding[0] * stages.has_embedding
    waiting = np.maximum(flight - 1 / v, 0) * of_blocks + (flight - 1) * before + head_saved

    def largest(column: Floats) -> Floats:
        return np.where(there, column, 0).max(axis=1)

    current = of_blocks / v
    offloads = table.offload_activations > 0
    waiting = np.where(offloads, np.minimum(waiting, 0), waiting)
    current = np.where(offloads, np.minimum(current, OFFLOAD_LEFT * largest(saved)), current)
    return RankActivations(
        waiting=waiting,
        current=current + before,
        saved=largest(saved),
        last_saved=largest(last[0]),
        forward_excess=largest(plain[1] - plain[0]),
        last_excess=largest(last[2] - last[0]),
        next_excess=largest(following[2] - following[0]),
        first_backward=largest(first[2]) + before,
        head_forward=(head[1] + heads * head[0]) * stages.has_head,
        head_backward=(head[2] + heads * head[0]) * stages.has_head,
        embedding_saved=before,
        embedding_backward=embedding[2] * stages.has_embedding,
        of_blocks=of_blocks,
        hidden=hidden * np.ones((3, 1)),
        dummies=_dummies(workload, shapes)[:, shape_of],
        largest_tensor=_largest_tensors(workload, shapes)[:, shape_of],
    )


def in_flight(table: LayoutTable, micro_batches: NDArray[np.int64]) -> Floats:
    """Micro-batches whose activations the first, a middle (the second) and the last rank hold at most: [3, layouts].

    Fractions are stages of `virtual_stages`: a rank may hold one stage of a micro-batch more than another.
    """
    pp, v = table.pp, table.virtual_stages
    rank = np.array([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1])
    flight = np.ones((3, len(table)))
    for number in distinct(table.schedule[pp > 1]):
        most, _ = in_flight_stages(SCHEDULES[number], pp, v, micro_batches, rank)
        flight = np.where((table.schedule == number) & (pp > 1), most / v, flight)
    return flight


Sorts = tuple[Floats, Floats, tuple[Floats, Floats, Floats]]
"""[saved, forward peak, backward peak] x kinds x layouts: of a block that is not recomputed as one of every k; what the
mean block saves; and the first block, the last but one, and the last."""


def _by_layout(workload: Workload, table: LayoutTable, shapes: list[Shape], shape_of: NDArray[np.intp]) -> Sorts:
    plain, again, share = _blocks(workload, table, shapes, shape_of)
    last_again, next_again = _recomputed_ends(workload, table, share)
    last, following = np.where(last_again, again, plain), np.where(next_again, again, plain)
    return plain, plain[0] * (1 - share) + again[0] * share, (np.where(share > 0, again, plain), following, last)


def _told(workload: Workload, table: LayoutTable, shapes: list[Shape], shape_of: NDArray[np.intp]) -> Sorts:
    """Of a table whose one layout tells each block's way."""
    kinds, kind_of_layer = layer_kinds(workload)
    model, stack, modes = workload.model, workload.stack, table.modes_of_blocks(len(kind_of_layer))
    of_mode = {
        mode: np.stack(
            [_parts([block_memory(model, layer, shapes[0], recompute=mode, stack=stack)]) for layer in kinds], axis=1
        )
        for mode in dict.fromkeys(modes)
    }
    # What all blocks of a kind save, over their number; a stage may hold others of them than the next.
    saved = np.zeros((len(kinds), 1))
    for kind in range(len(kinds)):
        own = [of_mode[mode][0, kind] for mode, layer_kind in zip(modes, kind_of_layer, strict=False) if layer_kind == kind]
        saved[kind] = np.mean(own, axis=0)
    widest = max(of_mode.values(), key=lambda memory: float((memory[1] - memory[0]).max()))
    return widest, saved, (of_mode[modes[0]], of_mode[modes[-2:][0]], of_mode[modes[-1]])


def _blocks(
    workload: Workload, table: LayoutTable, shapes: list[Shape], shape_of: NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """[saved, forward peak, backward peak] x kinds x layouts: of a block that is not recomputed as one of every k, of one that
    is, and the share of the latter."""
    every = RECOMPUTE.index("every-k")
    share = np.where(table.recompute == every, 1.0 / table.recompute_every, 0.0)
    mode = np.where(table.recompute == every, MODES.index("none"), table.recompute)
    by_mode: dict[int, Floats] = {}
    kinds = layer_kinds(workload)[0]
    for number in sorted(set(distinct(mode).tolist()) | ({MODES.index("full")} if share.any() else set())):
        memories = [
            [block_memory(workload.model, layer, shape, recompute=MODES[number], stack=workload.stack) for shape in shapes]
            for layer in kinds
        ]
        by_mode[number] = np.stack([_parts(row) for row in memories], axis=1)
    if len(by_mode) == 1:
        plain = next(iter(by_mode.values()))[:, :, shape_of]
    else:
        position = np.searchsorted(sorted(by_mode), mode)
        plain = np.stack(list(by_mode.values()))[position, :, :, shape_of].transpose(1, 2, 0)
    again = by_mode[MODES.index("full")][:, :, shape_of] if share.any() else plain
    return plain, again, share


def _recomputed_ends(workload: Workload, table: LayoutTable, share: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the last block, and the one before it, is one of every k that are recomputed."""
    layers, k = workload.model.num_hidden_layers, table.recompute_every
    return (share > 0) & ((layers - 1) % k == 0), (share > 0) & ((layers - 2) % k == 0)


def _dummies(workload: Workload, shapes: list[Shape]) -> Floats:
    """[1, shapes]."""
    kinds = layer_kinds(workload)[0]
    return np.array(
        [[dummy_gradient_bytes(workload.model, kinds, shape, stack=workload.stack) for shape in shapes]], dtype=float
    )


def _logits(workload: Workload, shapes: list[Shape]) -> Floats:
    """[1, shapes], of one micro-batch."""
    return np.array([[s.num_tokens * s.tp_part(workload.model.vocab_size) * s.itemsize for s in shapes]], dtype=float)


def _largest_tensors(workload: Workload, shapes: list[Shape]) -> Floats:
    """[1, shapes]; nothing where the allocator does not care."""
    if workload.stack.joins_segments:
        return np.zeros((1, len(shapes)))
    kinds, model = layer_kinds(workload)[0], workload.model
    made = [[one.num_bytes for kind in kinds for op in block_work(model, kind, shape) for one in op.makes] for shape in shapes]
    return np.array([[max(sizes) for sizes in made]], dtype=float)


def _parts(memories: list[BlockMemory]) -> Floats:
    """[saved, forward peak, backward peak] x parts."""
    rows = [(one.saved_bytes, one.forward_peak_bytes, one.backward_peak_bytes) for one in memories]
    return np.array(rows, dtype=float).T
