"""Activations of a rank, for whole tables of layouts, at every moment of its passes.

counts        of blocks held, waiting for W and at work, from the rank's own actions: `plan.columns.rank_loads`, once for each
              pipeline
bytes         of a block of each type, once for each distinct shape: `plan.columns.block_memory`, `plan.memory.gradients`
activations   the one times the other; the most of all passes of a kind
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.columns.block_memory import (
    BlockMemory,
    Recompute,
    block_memory,
    dummy_gradient_bytes,
    embedding_memory,
    head_memory,
)
from ultrascale.plan.columns.rank_loads import (
    APART,
    BY_TYPE,
    FORWARD_FIRST,
    PASSES,
    WHEN,
    Loads,
    Pipeline,
    enough_micro_batches,
    loads_of,
    loads_of_actions,
)
from ultrascale.plan.cut_backward import CUTTING
from ultrascale.plan.layouts import RECOMPUTE, SCHEDULES, LayoutTable, distinct
from ultrascale.plan.time.blocks import distinct_shapes, layer_kinds
from ultrascale.plan.time.stages import Stages, chunk_layers_of, stages_of_ranks
from ultrascale.plan.workload import Workload
from ultrascale.schedules.executable import Schedule
from ultrascale.spec.layout import OFFLOAD_LEFT, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.op_builders import without_fp8
from ultrascale.spec.stack import Stack
from ultrascale.spec.work import Shape, block_work

Floats = NDArray[np.float64]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
CUTS = [SCHEDULES.index(name) for name in CUTTING]
EVERY = RECOMPUTE.index("every-k")
ALL_FORWARD = np.array([name in FORWARD_FIRST for name in SCHEDULES])
"""By number: schedules in which all losses are there before the first backward pass."""


@dataclass(frozen=True)
class RankActivations:
    """Bytes, [3, layouts] or what broadcasts to it: the first, a middle and the last rank of the pipeline."""

    at_first: dict[str, Floats]
    """At each of `plan.columns.rank_loads.PASSES`; minus infinity where a rank has no such moment. Of the three times of
    `WHEN`."""
    at_between: dict[str, Floats]
    at_last: dict[str, Floats]
    pending: dict[str, Floats]
    """Shares of the rank's stages whose gradients of I wait for W then."""
    bare_head: NDArray[np.bool_]
    """Whether the last stage is the head alone, [layouts]."""
    saved: Floats
    """Of the block that saves most."""
    embedding_backward: Floats
    """With the gradient of its table, which FSDP has among its own."""
    has_embedding: NDArray[np.bool_]
    has_head: NDArray[np.bool_]
    of_blocks: Floats
    """What all blocks of a rank save of one micro-batch, wherever it is kept."""
    dummies: Floats
    """Gradients that nobody reads, kept for good; see `Stack.keeps_dummy_gradients`."""
    largest_tensor: Floats
    """Of all that a block makes."""


@dataclass(frozen=True)
class _Blocks:
    """Bytes of a block of each type, [types, layouts]: what it saves, its peaks, and what I leaves of it."""

    saved: Floats
    forward_peak: Floats
    backward_peak: Floats
    input_peak: Floats
    """In I, whatever waits for W included."""
    waits: Floats


def rank_activations(
    workload: Workload, table: LayoutTable, stages: Stages, micro_batches: NDArray[np.int64], schedule: Schedule | None = None
) -> RankActivations:
    """The activations of every layout of `table`; `schedule` for a table of one layout whose own is from a file."""
    model, stack = workload.model, workload.stack
    shapes, shape_of = distinct_shapes(workload, table)
    head = _parts([head_memory(model, shape, stack=stack) for shape in shapes])[:, shape_of]
    embedding = _parts([embedding_memory(model, shape, stack=stack) for shape in shapes])[:, shape_of]
    hidden = np.array([s.outer_tokens * model.hidden_size * s.itemsize for s in shapes], dtype=float)[shape_of]
    heads = model.num_nextn_predict_layers
    cuts = (table.pp > 1) & (np.isin(table.schedule, CUTS) | (schedule is not None))
    blocks = _blocks(workload, table, shapes, shape_of, any_kept=bool(stages.kept_layers.any()), cuts=cuts)
    offloads = table.offload_activations > 0
    kept = np.where(offloads, 0.0, 1.0)

    # Multi-token prediction goes through the same head, and its loss comes first: what it saves is there beside the other's.
    columns = np.concatenate([
        kept * blocks.saved, blocks.waits, blocks.forward_peak - blocks.saved, blocks.backward_peak - blocks.saved,
        blocks.input_peak - blocks.saved, [kept * embedding[0], kept * (1 + heads) * head[0], hidden, 0.0 * hidden],
    ])  # fmt: skip
    assert len(columns) == len(BY_TYPE) * len(blocks.saved) + len(APART)
    pipelines = _pipelines(workload, table, stages, micro_batches, len(blocks.saved))
    most, of_blocks, rank_saved = (
        np.empty((3, len(WHEN), len(PASSES), len(table))),
        np.empty((3, len(table))),
        np.empty((3, len(table))),
    )
    pending, bare_head = np.zeros((3, len(PASSES), len(table))), np.zeros(len(table), dtype=bool)
    for pipeline, rows in pipelines:
        loads = loads_of(pipeline) if schedule is None else loads_of_actions(schedule, pipeline)
        own, saved = columns[:, rows], blocks.saved[:, rows]
        if pipeline.schedule in FORWARD_FIRST and pipeline.pp > 1:
            most[..., rows] = _all_forward(loads, own, micro_batches[rows], len(saved))
        else:
            most[..., rows] = loads.most(own)
        of_rank, there = _blocks_of_ranks(pipeline)
        of_blocks[:, rows] = of_rank @ saved
        pending[:, :, rows] = loads.pending[:, :, None]
        bare_head[rows] = not pipeline.chunks[-1]
        rank_saved[:, rows] = np.where(there[:, :, None], saved, 0.0).max(axis=1)
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
        left = np.minimum(of_blocks / table.virtual_stages, OFFLOAD_LEFT * rank_saved) + embedding[0] * stages.has_embedding
        always += np.where(offloads, left, 0.0)
    return RankActivations(
        **{
            f"at_{when}": {name: most[:, row, number] + more[name] + always for number, name in enumerate(PASSES)}
            for row, when in enumerate(WHEN)
        },
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


def _all_forward(loads: Loads, columns: Floats, micro_batches: NDArray[np.int64], num_types: int) -> Floats:
    """Where all micro-batches go forward first: of one as it is counted, and of all others what each saves besides."""
    found = loads.most(columns)
    whole = np.zeros_like(columns)
    held = [*range(num_types), len(BY_TYPE) * num_types, len(BY_TYPE) * num_types + 1]
    whole[held] = columns[held]
    rest = Loads(np.maximum(loads.rows, 0.0), loads.begins, loads.never).most(whole)
    forward = [PASSES.index("forward"), PASSES.index("head forward"), PASSES.index("head backward")]
    every = np.where(np.isfinite(rest), rest, 0.0)
    every[:] = every[:, :, forward].max(axis=(1, 2))[:, None, None]
    found[:, 0] = np.maximum(found[:, 0], found[:, 2]) + (micro_batches - 1) * every[:, 0]
    found[:, 1] = np.where(micro_batches > 1, found[:, 0], -np.inf)
    return found


def _pipelines(
    workload: Workload, table: LayoutTable, stages: Stages, micro_batches: NDArray[np.int64], num_types: int
) -> list[tuple[Pipeline, NDArray[np.intp]]]:
    """The different pipelines of `table`, and the layouts with each."""
    every = np.where(table.recompute == EVERY, table.recompute_every, 0)
    piped = table.pp > 1
    # Those of one schedule follow one another, so that its lists are made once.
    keys = np.stack([
        every, table.kept_blocks, micro_batches, table.virtual_stages, table.pp, np.where(piped, table.schedule, 0)
    ])  # fmt: skip
    if len(table) == 1:
        return [(_pipeline(workload, table, stages, keys[:, 0], num_types), np.zeros(1, dtype=np.intp))]
    order = np.lexsort(keys)
    keys = keys[:, order]
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    by_pipeline: dict[Pipeline, list[NDArray[np.intp]]] = {}
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        one = _pipeline(workload, table, stages, keys[:, start], num_types)
        by_pipeline.setdefault(one, []).append(order[start:end])
    return [(one, np.concatenate(rows)) for one, rows in by_pipeline.items()]


def _pipeline(workload: Workload, table: LayoutTable, stages: Stages, key: NDArray[np.int64], num_types: int) -> Pipeline:
    """The pipeline of a column of numbers, in the order of `_pipelines`."""
    every, kept, count, virtual, pp, number = map(int, key)
    name = SCHEDULES[number]
    chunks = tuple(chunk_layers_of(workload, pp * virtual, stages.layers_per_stage))
    types = _types(workload, table.modes, every, kept)
    return Pipeline(name, pp, virtual, enough_micro_batches(name, pp, count), chunks, types, num_types)


def _types(workload: Workload, modes: tuple[str, ...], every: int, kept: int) -> tuple[int, ...]:
    """Of each block: its kind, whether it stays in bf16 beside fp8, and its way of recomputing."""
    kinds, kind_of_layer = layer_kinds(workload)
    last = workload.model.num_hidden_layers - kept
    layout = Layout(recompute="every-k", recompute_every=every) if every else None
    ways = list(dict.fromkeys(modes))
    found = []
    for layer, kind in enumerate(kind_of_layer):
        in_bf16 = kept > 0 and not kept <= layer < last and layer < workload.model.num_hidden_layers
        way = int(layout.recomputes(layer)) if layout else ways.index(modes[min(layer, len(modes) - 1)]) if modes else 0
        found.append((way * 2 + in_bf16) * len(kinds) + kind)
    return tuple(found)


def _blocks_of_ranks(pipeline: Pipeline) -> tuple[Floats, NDArray[np.bool_]]:
    """Blocks by type of the first, the fullest between and the last rank, of one micro-batch, and which types there are."""
    ends = np.cumsum(pipeline.chunks)
    rows = np.zeros((pipeline.pp, pipeline.num_types))
    for rank, stages in enumerate(stages_of_ranks(len(pipeline.chunks), pipeline.pp, pipeline.schedule)):
        for stage in stages:
            for kind in pipeline.types[ends[stage] - pipeline.chunks[stage] : ends[stage]]:
                rows[rank, kind] += 1
    there = rows > 0
    if pipeline.schedule == "dualpipe" and pipeline.pp > 1:
        rows /= 2
    between = rows[1:-1][rows[1:-1].sum(axis=1).argmax()] if pipeline.pp > 2 else np.zeros(pipeline.num_types)
    return np.array([rows[0], between, rows[-1]]), np.array([there[0], there[1:-1].any(axis=0), there[-1]])


def _blocks(
    workload: Workload,
    table: LayoutTable,
    shapes: list[Shape],
    shape_of: NDArray[np.intp],
    *,
    any_kept: bool,
    cuts: NDArray[np.bool_],
) -> _Blocks:
    """Types in the order of `_types`: by way, in fp8 or kept in bf16, by kind."""
    kinds, model, stack = layer_kinds(workload)[0], workload.model, workload.stack
    every = table.recompute == EVERY
    if table.modes:
        ways = list(dict.fromkeys(table.modes))
        modes = [np.full(len(table), number) for number in range(len(ways))]
    else:
        ways = list(MODES)
        modes = [np.where(every, MODES.index("none"), table.recompute)]
        modes += [np.full(len(table), MODES.index("full"))] if every.any() else []

    known, count = _known_blocks(model, stack), len(shapes)
    cut = np.zeros(count, dtype=bool)
    cut[shape_of[cuts]] = True

    def of_shape(shape: Shape, mode: str, is_cut: bool) -> Floats:
        """[kinds, 3], or of I [kinds, 2]."""
        key = shape, mode, is_cut
        if key not in known:
            # Without the cache of single blocks: numbers are kept here, and a search has many.
            some = [block_memory.__wrapped__(model, layer, shape, recompute=mode, stack=stack, cuts=is_cut) for layer in kinds]
            rows = [(one.saved_bytes, one.forward_peak_bytes, one.backward_peak_bytes, one.waiting_bytes) for one in some]
            known[key] = np.array(rows, dtype=float)[:, slice(2, 4) if is_cut else slice(3)]
        return known[key]

    found = []
    nothing = np.zeros((len(kinds), 2))
    for mode in modes:
        used = distinct(mode).tolist()
        position = np.searchsorted(used, mode)
        for some in (shapes, [without_fp8(shape) for shape in shapes] if any_kept else None):
            if some is None:
                found += [np.zeros((5, len(table)))] * len(kinds)
                continue
            told = np.empty((len(used), count, len(kinds), 5))
            for row, number in enumerate(used):
                told[row, :, :, :3] = [of_shape(shape, ways[number], False) for shape in some]
                told[row, :, :, 3:] = [
                    of_shape(shape, ways[number], True) if is_cut else nothing for shape, is_cut in zip(some, cut, strict=True)
                ]
            found += list(told[position, shape_of].transpose(1, 2, 0))
    return _Blocks(*np.stack(found, axis=1))


@lru_cache(maxsize=8)
def _known_blocks(model: Model, stack: Stack) -> dict[tuple[Shape, str, bool], Floats]:
    """What `_blocks` worked out so far: DeepSeek-V3 on 2,048 devices has 11,000 shapes."""
    return {}


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
