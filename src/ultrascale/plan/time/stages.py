"""Layers and parameters of three sorts of pipeline ranks, for a whole table of layouts.

The model is partitioned into pp x virtual_stages chunks as the stack does it: ours so that the slowest is as fast as possible
(`plan.time.stage_cut`), most others into equal chunks. Three sorts of ranks describe the pipeline: the first, the last, and one
for all between, the fullest. `description.schedules` assigns chunks to ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, weights_outside_layers
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.layouts import SCHEDULE_NAMES, Column, Floats, LayoutTable, by_schedule
from ultrascale.plan.time.blocks import kinds_of_layers
from ultrascale.plan.time.stage_cut import stage_blocks
from ultrascale.plan.workload import Workload

FIRST, MIDDLE, LAST = range(3)
FOLDED = by_schedule(lambda schedule: schedule.placement != "around")
"""By schedule number: True if ranks do not hold every pp-th stage."""
COPIES = by_schedule(lambda schedule: schedule.copies)


class Parts(NamedTuple):
    """Parts of the model that each rank, or each chunk of a pipeline, holds: columns [rows, ..., layouts]."""

    layers: Floats
    """Blocks by kind, [rows, kinds, layouts]."""
    embedding: Floats
    head: Floats
    kept: Floats
    """Part of `layers` that stays in bf16 in an fp8 run."""


@dataclass(frozen=True)
class Stages:
    """Columns of shape [3, layouts], or [3, kinds, layouts]: the first, an inner and the last pipeline rank."""

    layers: Floats
    """Blocks of a rank, by kind."""
    chunk_layers: Floats
    """Blocks of the largest chunk of a rank, all kinds together."""
    has_embedding: Floats
    has_head: Floats
    dense_parameters: Floats
    """Dense parameters of one rank, sharded by tp; tied embeddings are counted on both ends if pp > 1."""
    expert_parameters: Floats
    """Routed experts' parameters of one rank, sharded by ep and expert_tp."""
    root_parameters: Floats
    """Parameters outside the blocks, sharded by tp."""
    kept_layers: Floats
    """Part of `layers` that stays in bf16 in an fp8 run."""
    exists: Floats
    """Number of ranks of this sort in a pipeline: 1, pp - 2, 1; with pp = 1 the first is the only rank."""
    layers_per_stage: tuple[int, ...] | None = None
    """Explicit partition, if given."""

    @property
    def parts(self) -> Parts:
        return Parts(self.layers, self.has_embedding, self.has_head, self.kept_layers)


def partition_stages(workload: Workload, table: LayoutTable, layers_per_stage: tuple[int, ...] | None = None) -> Stages:
    """Stages of every layout of `table`. `layers_per_stage`: explicit partition, for a table of one layout."""
    kept_blocks = table.kept_blocks
    rows, which = _distinct_partitions(table, kept_blocks)
    kinds, kind_of_layer = kinds_of_layers(workload.model)
    sizes = 2 * tuple(sum(block_parameters(workload.model, layer, 1)) for layer in kinds)
    sorts = []
    for row in rows:
        pp, name = int(table.pp[row]), SCHEDULE_NAMES[table.schedule[row]]
        chunks = chunk_layers_of(workload, pp * int(table.virtual_stages[row]), layers_per_stage)
        layout_kinds = kinds_with_kept(workload.model, kind_of_layer, len(kinds), int(kept_blocks[row]))
        sorts.append(_sorts_of_ranks(tuple(chunks), pp, name, layout_kinds, sizes))
    every = np.array(sorts)[which].transpose(1, 2, 0)  # [3, 2 kinds + 3, layouts]
    in_fp8, kept = every[:, : len(kinds)], every[:, len(kinds) : -3]
    layers = in_fp8 + kept
    embedding, head, chunk_layers = every[:, -3], every[:, -2], every[:, -1]
    per_layer, expert = parameters_by_kind(workload, table)
    outside_embedding, outside_head, tied = outside_parameters(workload, table)
    of_embedding = embedding * outside_embedding
    of_head = head * (np.where(table.pp == 1, 0.0, outside_head) if tied else outside_head)  # two stages have two copies
    expert_parameters = np.zeros((3, len(table)))
    if expert.any():
        expert_parameters = (layers * (expert[:, None] / (table.ep * table.expert_tp))).sum(axis=1)
    exists = np.ones((3, len(table)))
    exists[MIDDLE], exists[LAST] = np.maximum(table.pp - 2, 0), table.pp > 1
    return Stages(
        layers=layers,
        chunk_layers=chunk_layers,
        has_embedding=embedding,
        has_head=head,
        dense_parameters=(layers * per_layer).sum(axis=1) + of_embedding + of_head,
        expert_parameters=expert_parameters,
        root_parameters=of_embedding + of_head,
        kept_layers=kept,
        exists=exists,
        layers_per_stage=layers_per_stage,
    )


def num_weight_copies(table: LayoutTable) -> Column:
    """Copies of the weights in a pipeline, [layouts]. With two pipelines in opposite directions (DualPipe) a rank holds a stage
    of each, and `Stages` counts half of both."""
    return np.where(table.pp > 1, COPIES[table.schedule], 1)


def _distinct_partitions(table: LayoutTable, kept_blocks: Column) -> tuple[Sequence[int] | Column, Sequence[int] | Column]:
    """Distinct partitions of the model, and for each layout the index of its own."""
    if len(table) == 1:
        return [0], [0]
    key = (table.pp * 4096 + table.virtual_stages) * len(FOLDED) + table.schedule * FOLDED[table.schedule]
    key = key * (int(kept_blocks.max(initial=0)) + 1) + kept_blocks
    _, rows, which = np.unique(key, return_index=True, return_inverse=True)
    return rows, which


@lru_cache(maxsize=1024)
def kinds_with_kept(model: Model, kind_of_layer: tuple[int, ...], num_kinds: int, kept: int) -> tuple[int, ...]:
    """Kind of every layer; the first and last `kept` ones, which stay in bf16, have `num_kinds` added."""
    last = model.num_hidden_layers - kept
    return tuple(
        kind if kept <= layer < last or layer >= model.num_hidden_layers else kind + num_kinds
        for layer, kind in enumerate(kind_of_layer)
    )


def chunk_layers_of(workload: Workload, num_chunks: int, layers_per_stage: Sequence[int] | None) -> list[int]:
    """Blocks of each chunk, with prediction blocks in the last: as given, or by `Stack.stage_cut`."""
    model = workload.model
    if layers_per_stage is None:
        return stage_blocks(model, num_chunks, workload.sequence_length, workload.stack.stage_cut)
    return [*layers_per_stage[:-1], layers_per_stage[-1] + model.num_nextn_predict_layers]


@lru_cache(maxsize=4096)
def _sorts_of_ranks(
    chunks: tuple[int, ...], pp: int, schedule: str, kind_of_layer: tuple[int, ...], sizes: tuple[int, ...]
) -> list[list[float]]:
    """[3, kinds + 3]: rows of the first, the fullest inner (by `sizes`, parameters of each kind) and the last rank. Columns:
    blocks by kind, 1 if it holds the embedding, 1 if it holds the head, and blocks of the largest chunk."""
    ends, num_kinds, known = np.cumsum(chunks), len(sizes), SCHEDULES[schedule]
    rows = []
    for stages in known.stages_of_ranks(pp, len(chunks)):
        by_kind = [0.0] * num_kinds
        for stage in stages:
            for kind in kind_of_layer[ends[stage] - chunks[stage] : ends[stage]]:
                by_kind[kind] += 1
        row = [*by_kind, float(stages.count(0)), float(stages.count(len(chunks) - 1)), float(max(chunks[s] for s in stages))]
        if pp > 1:  # each copy processes its share of the micro-batches
            row[:-1] = [value / known.copies for value in row[:-1]]
        rows.append(row)
    between = max(rows[1:-1], key=lambda row: sum(map(mul, row, sizes)), default=rows[0] if pp == 1 else [0.0] * len(rows[0]))
    return [rows[0], between, rows[-1]]


def parameters_by_kind(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats]:
    """Parameters of one block of each kind: dense ones on one tp rank, [kinds, layouts]; all routed experts, [kinds]."""
    kinds = kinds_of_layers(workload.model)[0]
    tps, tp_index = (table.tp, [0]) if len(table) == 1 else np.unique(table.tp, return_inverse=True)
    parameters = _parameters(workload.model, kinds, tuple(tps.tolist()))
    return parameters[:, tp_index, 0], parameters[:, 0, 1]


@lru_cache(maxsize=1024)
def _parameters(model: Model, layers: tuple[int, ...], tps: tuple[int, ...]) -> Floats:
    """`block_parameters` of layers and degrees of tp, [layers, tps, 2]."""
    return np.array([[block_parameters(model, layer, tp) for tp in tps] for layer in layers], dtype=float)


@lru_cache(maxsize=4096)
def block_parameters(model: Model, layer: int, tp: int) -> tuple[int, int]:
    """Parameters of one block: dense ones on one tp rank, and all routed experts'."""
    weights = layer_weights(model, layer)
    return sum(w.local_numel(tp=tp) for w in weights if not w.is_expert), sum(w.numel for w in weights if w.is_expert)


def outside_parameters(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats, bool]:
    """Parameters of the embedding and of the head on one rank, with the vocabulary padded and sharded over tp; True if tied."""
    model = workload.model
    multiple = workload.stack.pads_vocab_to * table.tp
    rows = -(-model.vocab_size // multiple) * multiple / table.tp
    positions = _without_vocabulary(model) - model.hidden_size
    table_size = rows * model.hidden_size
    return table_size + max(positions, 0), table_size + model.hidden_size, model.tie_word_embeddings


@lru_cache(maxsize=256)
def _without_vocabulary(model: Model) -> int:
    """Parameters outside the blocks without a vocabulary dimension: the final norm, and learned positions."""
    return sum(w.numel for w in weights_outside_layers(model) if model.vocab_size not in w.shape)
