"""Activations of a rank, for whole tables of layouts, at every moment of its passes.

counts        of blocks that are held, wait for W or are running, from the rank's actions: `plan.columns.rank_loads`, once for
              each pipeline
bytes         of a block of each type, once for each distinct shape: `plan.columns.block_memory`, `plan.memory.gradients`
activations   counts times bytes; the maximum over all passes of a kind
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import OFFLOAD_RESIDENT, Layout
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.columns.block_memory import (
    Recompute,
    block_columns,
    dummy_gradient_bytes,
    embedding_columns,
    head_columns,
)
from ultrascale.plan.columns.rank_loads import (
    BY_TYPE,
    OTHER_COLUMNS,
    PASSES,
    WHEN,
    Loads,
    PipelineShape,
    loads_of,
    loads_of_actions,
)
from ultrascale.plan.layouts import (
    RECOMPUTE,
    SCHEDULE_NAMES,
    Bools,
    Column,
    Floats,
    Indices,
    LayoutTable,
    by_schedule,
    distinct,
)
from ultrascale.plan.time.blocks import distinct_shapes, kinds_of_layers
from ultrascale.plan.time.stages import Stages, chunk_layers_of
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import enough_micro_batches
from ultrascale.schedules.executable import Schedule
from ultrascale.work.op_builders import without_fp8
from ultrascale.work.work import Shape, block_work, shared_work

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SPLITS_BACKWARD = by_schedule(lambda schedule: bool(schedule.splits_backward))
EVERY = RECOMPUTE.index("every-k")
ALL_FORWARD = by_schedule(lambda schedule: schedule.forward_first)


@dataclass(frozen=True)
class RankActivations:
    """Bytes, [3, layouts] or broadcastable to it: the first, a middle and the last rank of the pipeline."""

    at: dict[str, Floats]
    """Bytes at each of `plan.columns.rank_loads.PASSES`, [3, WHEN, layouts]; minus infinity where a rank has no such moment."""
    pending: dict[str, Floats]
    """Fraction of the rank's stages whose gradients from I wait for W at that moment."""
    bare_head: Bools
    """True where the last stage is the head alone, [layouts]."""
    saved: Floats
    """Largest number of bytes saved by a block of the rank."""
    embedding_backward: Floats
    """Backward peak of the embedding, with its weight gradient (under FSDP that is counted with FSDP's gradients)."""
    has_embedding: Bools
    has_head: Bools
    of_blocks: Floats
    """Bytes that all blocks of a rank save of one micro-batch, on the device or off it."""
    dummies: Floats
    """Dummy gradients, kept permanently; see `Stack.keeps_dummy_gradients`."""
    largest_tensor: Floats
    """Largest tensor that a block makes."""


@dataclass(frozen=True)
class _Blocks:
    """Bytes of a block of each type, [types, layouts]: saved bytes, peaks, and bytes that I keeps for W."""

    saved: Floats
    forward_peak: Floats
    backward_peak: Floats
    input_peak: Floats
    """Peak in I, with tensors kept for W."""
    waits: Floats


def rank_activations(
    workload: Workload, table: LayoutTable, stages: Stages, micro_batches: Column,
    schedule: Schedule | None = None, sums: Floats | None = None,
) -> RankActivations:  # fmt: skip
    """Activations of every layout of `table`. `schedule`: from a file, for a table of one layout. `sums`: bytes of summed
    gradients during and at the end of a step, [3, 2, layouts]; those not yet allocated at a moment are subtracted."""
    sums = np.zeros((3, 2, len(table))) if sums is None else sums
    model, stack = workload.model, workload.stack
    shapes, shape_of = distinct_shapes(workload, table)
    head, embedding = (
        np.stack(_cached(workload, part, shapes, partial(columns, model, stack=stack)))[shape_of].T
        for part, columns in (("head", head_columns), ("embedding", embedding_columns))
    )
    hidden = np.array([s.outer_tokens * model.hidden_size * s.itemsize for s in shapes], dtype=float)[shape_of]
    heads = model.num_nextn_predict_layers
    splits = (table.pp > 1) & (SPLITS_BACKWARD[table.schedule] | (schedule is not None))
    blocks = _blocks(workload, table, shapes, shape_of, any_kept=bool(stages.kept_layers.any()), splits=splits)
    offloads = table.offload_activations > 0
    on_device = np.where(offloads, 0.0, 1.0)

    shared = np.array([_shared_bytes(model, shape) for shape in shapes], dtype=float)[shape_of]
    # Multi-token prediction goes through the same head, and its loss comes first: what it saves is there beside the other's.
    columns = np.concatenate([
        on_device * blocks.saved, blocks.waits, blocks.forward_peak - blocks.saved, blocks.backward_peak - blocks.saved,
        blocks.input_peak - blocks.saved, [on_device * embedding[0], on_device * (1 + heads) * head[0], hidden, shared],
        np.zeros((3, len(table))),
    ])  # fmt: skip
    assert len(columns) == len(BY_TYPE) * len(blocks.saved) + len(OTHER_COLUMNS)
    num_types = len(blocks.saved)
    pipelines = _pipelines(workload, table, stages, micro_batches)
    most, of_blocks, rank_saved = (
        np.empty((3, len(WHEN), len(PASSES), len(table))),
        np.empty((3, len(table))),
        np.empty((3, len(table))),
    )
    pending, bare_head = np.zeros((3, len(PASSES), len(table))), np.zeros(len(table), dtype=bool)
    for pipeline, used, rows in pipelines:
        loads = loads_of(pipeline) if schedule is None else loads_of_actions(schedule, pipeline)
        of_types = [part * num_types + kind for part in range(len(BY_TYPE)) for kind in used]
        of_pipeline = columns[np.array([*of_types, *range(len(BY_TYPE) * num_types, len(columns))])[:, None], rows]
        saved = blocks.saved[np.array(used)[:, None], rows]
        if SCHEDULES[pipeline.schedule].forward_first and pipeline.pp > 1:
            most[..., rows] = _all_forward(
                loads, of_pipeline, micro_batches[rows], len(saved), bare_head=not pipeline.chunks[-1]
            )
            most[:, 0, :, rows] -= sums[:, 0, rows].T[:, :, None]
        else:
            most[..., rows] = loads.most(of_pipeline, sums[..., rows]) - sums[:, 0][:, None, None, rows]
        of_rank, has_type = _blocks_of_ranks(pipeline)
        of_blocks[:, rows] = of_rank @ saved
        pending[:, :, rows] = loads.pending[:, :, None]
        bare_head[rows] = not pipeline.chunks[-1]
        rank_saved[:, rows] = np.where(has_type[:, :, None], saved, 0.0).max(axis=1)
    has_embedding, has_head = stages.has_embedding > 0, stages.has_head > 0
    more = dict.fromkeys(PASSES, np.zeros(1))
    more["head forward"] = np.where(has_head, head[1] + heads * head[0], 0.0)
    more["head backward"] = np.where(has_head, head[2] + heads * head[0], 0.0)
    more["reduction"] = hidden
    always = np.zeros((3, len(table)))
    if stack.keeps_outputs:
        later = np.where(table.pp > 1, micro_batches - 1, 0)
        outputs = _logits(workload, shapes)[:, shape_of] * stages.has_head * later
        always += np.maximum(
            outputs - (1 + heads) * head[0] * stages.has_head * np.where(ALL_FORWARD[table.schedule], later, 0), 0.0
        )
    if offloads.any():
        resident = (
            np.minimum(of_blocks / table.virtual_stages, OFFLOAD_RESIDENT * rank_saved) + embedding[0] * stages.has_embedding
        )
        always += np.where(offloads, resident, 0.0)
    return RankActivations(
        at={name: most[:, :, number] + (more[name] + always)[:, None] for number, name in enumerate(PASSES)},
        pending={name: pending[:, number] for number, name in enumerate(PASSES)},
        bare_head=bare_head,
        saved=rank_saved,
        embedding_backward=np.where(has_embedding, embedding[2], 0.0),
        has_embedding=has_embedding,
        has_head=has_head,
        of_blocks=of_blocks,
        dummies=_dummies(workload, shapes)[:, shape_of],
        largest_tensor=_largest_tensors(workload, shapes)[:, shape_of],
    )


def least_of_blocks(workload: Workload, table: LayoutTable, stages: Stages) -> tuple[Floats, Floats]:
    """Lower bounds, [3, layouts]: bytes that a rank's blocks save for one micro-batch on the device, and additional bytes of
    one running block. Minima over recomputation options if blocks of a kind differ, and over kinds of blocks."""
    shapes, shape_of = distinct_shapes(workload, table)
    blocks = _blocks(
        workload, table, shapes, shape_of, any_kept=bool(stages.kept_layers.any()), splits=np.zeros(len(table), bool)
    )
    num_kinds, splits = stages.layers.shape[1], (table.pp > 1) & SPLITS_BACKWARD[table.schedule]
    forward, backward = blocks.forward_peak - blocks.saved, blocks.backward_peak - blocks.saved
    beside = np.where(splits, forward, np.maximum(forward, backward))
    by_way = [column.reshape(-1, 2, num_kinds, len(table)) for column in (blocks.saved, beside)]
    if not stages.kept_layers.any():
        by_way = [column[:, :1] for column in by_way]
    (saved, *recomputed), (at_work, *others) = (column.min(axis=1) for column in by_way)  # [kinds, layouts]
    held, every_k = (saved * stages.layers).sum(axis=1), table.recompute == EVERY
    if recomputed:  # at most one block more a stage than every k-th of them
        count = stages.layers.sum(axis=1)
        num_not_recomputed = np.maximum(count - -(-count // table.recompute_every) - table.virtual_stages, 0)
        least = (recomputed[0] * stages.layers).sum(axis=1) + num_not_recomputed * np.maximum(saved - recomputed[0], 0.0).min(
            axis=0
        )
        held, at_work = np.where(every_k, least, held), np.where(every_k, np.minimum(at_work, others[0]), at_work)
    largest = np.where(stages.layers > 0, at_work, np.inf).min(axis=1)
    held = np.where(table.offload_activations > 0, 0.0, held)
    return held, np.where(np.isfinite(largest), np.maximum(largest, 0.0), 0.0)


def _all_forward(loads: Loads, columns: Floats, micro_batches: Column, num_types: int, *, bare_head: bool) -> Floats:
    """Bytes of schedules that run all forward passes first, [3, WHEN, PASSES, layouts]: one micro-batch in full, plus the
    saved bytes of each other one. `bare_head`: the last stage has no blocks, so the loads do not contain the head."""
    most = loads.most(columns)
    whole = np.zeros_like(columns)
    apart = len(BY_TYPE) * num_types
    held = [*range(num_types), *(apart + OTHER_COLUMNS.index(name) for name in ("embedding", "head", "shared"))]
    whole[held] = columns[held]
    of_others = Loads(np.maximum(loads.rows, 0.0), loads.begins, loads.absent).most(whole)
    forward = [PASSES.index("forward"), PASSES.index("head forward"), PASSES.index("head backward")]
    every = np.where(np.isfinite(of_others), of_others, 0.0)
    every[:] = every[:, :, forward].max(axis=(1, 2))[:, None, None]
    if bare_head:
        every[2] += columns[apart + OTHER_COLUMNS.index("head")]
    most[:, 0] = np.maximum(most[:, 0], most[:, 2]) + (micro_batches - 1) * every[:, 0]
    most[:, 1] = np.where(micro_batches > 1, most[:, 0] - every[:, 0], -np.inf)
    return most


def _pipelines(
    workload: Workload, table: LayoutTable, stages: Stages, micro_batches: Column
) -> list[tuple[PipelineShape, tuple[int, ...], Indices]]:
    """Distinct pipelines of `table`, with the types of blocks of each, and the indices of its layouts."""
    every = np.where(table.recompute == EVERY, table.recompute_every, 0)
    piped = table.pp > 1
    # Those of one schedule follow one another, so that its lists are made once.
    keys = np.stack([
        every, table.kept_blocks, micro_batches, table.virtual_stages, table.pp, np.where(piped, table.schedule, 0)
    ])  # fmt: skip
    if len(table) == 1:
        return [(*_pipeline(workload, table, stages, keys[:, 0]), np.zeros(1, dtype=np.intp))]
    order = np.lexsort(keys)
    keys = keys[:, order]
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    by_pipeline: dict[tuple[PipelineShape, tuple[int, ...]], list[Indices]] = {}
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        key = _pipeline(workload, table, stages, keys[:, start])
        by_pipeline.setdefault(key, []).append(order[start:end])
    return [(*key, np.concatenate(rows)) for key, rows in by_pipeline.items()]


def _pipeline(workload: Workload, table: LayoutTable, stages: Stages, key: Column) -> tuple[PipelineShape, tuple[int, ...]]:
    """Pipeline of a column of `_pipelines`' numbers, and the types of blocks into which its own types are indices."""
    every, kept, count, virtual, pp, number = map(int, key)
    name = SCHEDULE_NAMES[number]
    chunks = tuple(chunk_layers_of(workload, pp * virtual, stages.layers_per_stage))
    used, places = _types(workload.model, table.modes, every, kept)
    held_once = pp > 1 and SCHEDULES[name].forward_first  # bytes of one micro-batch times all
    few = 1 if held_once else min(count, 2) if pp == 1 else enough_micro_batches(name, pp, count)
    return PipelineShape(name, pp, virtual, few, chunks, places, len(used), bool(workload.model.num_experts)), used


def _shared_bytes(model: Model, shape: Shape) -> int:
    """Bytes that a micro-batch's blocks share and hold for their backward passes: not a mask that attention only reads."""
    ops, layers = shared_work(model, shape), kinds_of_layers(model)[0]
    has_mask = any(op.name != "angles" for op in ops)
    saved = {name for layer in layers for op in block_work(model, layer, shape) for name in op.saves} if has_mask else set()
    return sum(made.num_bytes for op in ops for made in op.makes if op.name == "angles" or made.name in saved)


@lru_cache(maxsize=1024)
def _types(model: Model, modes: tuple[str, ...], every: int, kept: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Types of blocks, and each block's index among them. A type encodes as one number: the kind, whether the block stays in
    bf16 in an fp8 run, and its recomputation."""
    kinds, kind_of_layer = kinds_of_layers(model)
    last = model.num_hidden_layers - kept
    layout = Layout(recompute="every-k", recompute_every=every) if every else None
    ways = list(dict.fromkeys(modes))
    types = []
    for layer, kind in enumerate(kind_of_layer):
        in_bf16 = kept > 0 and not kept <= layer < last and layer < model.num_hidden_layers
        mode = (
            int(layout.is_fully_recomputed(layer)) if layout else ways.index(modes[min(layer, len(modes) - 1)]) if modes else 0
        )
        types.append((mode * 2 + in_bf16) * len(kinds) + kind)
    used = tuple(sorted(set(types)))
    return used, tuple(map(used.index, types))


@lru_cache(maxsize=4096)
def _blocks_of_ranks(pipeline: PipelineShape) -> tuple[Floats, Bools]:
    """Blocks by type of the first, the fullest inner and the last rank, for one micro-batch, and which types occur."""
    known, num_stages, num_types = SCHEDULES[pipeline.schedule], len(pipeline.chunks), pipeline.num_types
    cells = np.repeat(np.arange(num_stages), pipeline.chunks) * num_types + np.array(pipeline.types)
    of_stages = np.bincount(cells, minlength=num_stages * num_types).reshape(num_stages, num_types)
    stages_of_ranks = known.stages_of_ranks(pipeline.pp, num_stages)
    rows = np.array([of_stages[stages].sum(axis=0) for stages in stages_of_ranks], dtype=float)
    present = rows > 0
    if pipeline.pp > 1:
        rows /= known.copies
    between = rows[1:-1][rows[1:-1].sum(axis=1).argmax()] if pipeline.pp > 2 else np.zeros(pipeline.num_types)
    return np.array([rows[0], between, rows[-1]]), np.array([present[0], present[1:-1].any(axis=0), present[-1]])


def _blocks(
    workload: Workload,
    table: LayoutTable,
    shapes: list[Shape],
    shape_of: Indices,
    *,
    any_kept: bool,
    splits: Bools,
) -> _Blocks:
    """Bytes of blocks; types in the order of `_types`: by recomputation, fp8 or bf16, kind."""
    kinds = kinds_of_layers(workload.model)[0]
    every = table.recompute == EVERY
    if table.modes:
        ways = list(dict.fromkeys(table.modes))
        modes = [np.full(len(table), number) for number in range(len(ways))]
    else:
        ways = list(MODES)
        modes = [np.where(every, MODES.index("none"), table.recompute)]
        modes += [np.full(len(table), MODES.index("full"))] if every.any() else []

    count = len(shapes)
    has_split = np.zeros(count, dtype=bool)
    has_split[shape_of[splits]] = True
    columns = []
    for mode in modes:
        used = distinct(mode).tolist()
        position = np.searchsorted(used, mode)
        for block_shapes in (shapes, [without_fp8(shape) for shape in shapes] if any_kept else None):
            if block_shapes is None:
                columns += [np.zeros((5, len(table)))] * len(kinds)
                continue
            sizes = np.empty((len(used), count, len(kinds), 5))
            for row, number in enumerate(used):
                sizes[row, :, :, :3] = _of_shapes(workload, block_shapes, ways[number])
                sizes[row, :, :, 3:] = 0.0
                if has_split.any():
                    split_shapes = [shape for shape, is_split in zip(block_shapes, has_split, strict=True) if is_split]
                    sizes[row, has_split, :, 3:] = _of_shapes(workload, split_shapes, ways[number], splits=True)
            columns += list(sizes[position, shape_of].transpose(1, 2, 0))
    return _Blocks(*np.stack(columns, axis=1))


def _of_shapes(workload: Workload, shapes: Sequence[Shape], mode: str, *, splits: bool = False) -> list[Floats]:
    """Bytes of blocks of each shape, [kinds, 3]: saved, forward peak, backward peak; with `splits` [kinds, 2]: peak of I, and
    bytes kept for W."""
    kinds, fields = kinds_of_layers(workload.model)[0], slice(2, 4) if splits else slice(3)

    def columns(new: Sequence[Shape]) -> Floats:
        of_kinds = [
            block_columns(workload.model, layer, new, recompute=mode, stack=workload.stack, splits=splits) for layer in kinds
        ]
        return np.stack(of_kinds, axis=1)[:, :, fields]

    return _cached(workload, (mode, splits), shapes, columns)


def _cached(
    workload: Workload, key: Hashable, shapes: Sequence[Shape], columns: Callable[[Sequence[Shape]], Floats]
) -> list[Floats]:
    """Rows of `columns` by shape, computed once for each; `key` is what they are of."""
    known = _cached_rows(workload.model, workload.stack)[key]
    if new := [shape for shape in dict.fromkeys(shapes) if shape not in known]:
        known.update(zip(new, columns(new), strict=True))
    return [known[shape] for shape in shapes]


@lru_cache(maxsize=8)
def _cached_rows(model: Model, stack: Stack) -> defaultdict[Hashable, dict[Shape, Floats]]:
    """Rows of `_cached`, by key."""
    return defaultdict(dict)


def cache_blocks(workload: Workload, shapes: Sequence[Shape]) -> None:
    """Compute in one call, and cache, the blocks of these shapes that `least_of_blocks` needs, and their largest tensors."""
    _largest_tensors(workload, shapes)
    for mode in MODES:
        _of_shapes(workload, shapes, mode)


def _dummies(workload: Workload, shapes: list[Shape]) -> Floats:
    """Bytes of dummy gradients, [1, shapes]."""
    kinds = kinds_of_layers(workload.model)[0]
    return np.array(
        [[dummy_gradient_bytes(workload.model, kinds, shape, stack=workload.stack) for shape in shapes]], dtype=float
    )


def _logits(workload: Workload, shapes: list[Shape]) -> Floats:
    """Bytes of logits of one micro-batch, [1, shapes]."""
    return np.array([[s.num_tokens * s.tp_part(workload.model.vocab_size) * s.itemsize for s in shapes]], dtype=float)


def _largest_tensors(workload: Workload, shapes: Sequence[Shape]) -> Floats:
    """Bytes of a block's largest tensor, [1, shapes]; 0 where the allocator joins segments."""
    if workload.stack.joins_segments:
        return np.zeros((1, len(shapes)))
    return np.array([[_largest_tensor(workload.model, shape) for shape in shapes]], dtype=float)


@lru_cache(maxsize=1 << 14)
def _largest_tensor(model: Model, shape: Shape) -> int:
    return max(
        activation.num_bytes
        for kind in kinds_of_layers(model)[0]
        for op in block_work(model, kind, shape)
        for activation in op.makes
    )
