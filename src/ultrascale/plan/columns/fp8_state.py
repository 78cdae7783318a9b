"""State that fp8 adds to a rank, for whole tables of layouts: amax histories of delayed scaling, and scales of weights that are
all-gathered in 8 bits. `plan.memory.replay` counts one layout's to the byte; sorts of ranks are those of `plan.time.stages`.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.layouts import FP8_SCALINGS, PRECISIONS, Floats, LayoutTable
from ultrascale.plan.time.blocks import kinds_of_layers
from ultrascale.plan.time.stages import Stages, num_weight_copies
from ultrascale.plan.workload import Workload
from ultrascale.work.fp8_slots import SLOT_BYTES, block_slots, num_block_slots


class BlockCounts(NamedTuple):
    """Counts of a block in fp8: dense weights of one tp rank, and weights of all experts."""

    dense: float
    """Dense parameters of fp8 GEMMs."""
    expert: float
    dense_scales: float
    """Number of scales of these weights, with row-wise scales."""
    expert_scales: float
    matrices: float
    experts_matrices: float
    slots: float
    """Slots of delayed scaling in the whole block."""


@lru_cache(maxsize=4096)
def block_counts(model: Model, layer: int, tp: int) -> BlockCounts:
    """Counts of block `layer`; equal for every block of its kind."""
    names = {f"layers.{layer}.{name}.weight" for name in block_slots(model, layer)}
    in_fp8 = [weight for weight in layer_weights(model, layer) if weight.name in names]
    dense, experts = ([weight for weight in in_fp8 if weight.is_expert is is_expert] for is_expert in (False, True))
    columns = {w.name: -(-w.shape[-1] // (tp if w.tp_dim == len(w.shape) - 1 else 1)) for w in dense}
    return BlockCounts(
        sum(w.local_numel(tp=tp) for w in dense),
        sum(w.numel for w in experts),
        sum(w.local_numel(tp=tp) / columns[w.name] for w in dense),
        sum(prod(w.shape[:-1]) for w in experts),
        len(dense),
        sum(w.shape[0] for w in experts),
        num_block_slots(model, layer),
    )


def counts_of_ranks(workload: Workload, table: LayoutTable, stages: Stages) -> BlockCounts:
    """Counts summed over a rank's fp8 blocks, each [3, layouts]; only the rank's own experts."""
    kinds, ways = kinds_of_layers(workload.model)[0], table.tp
    tps, tp_index = np.unique(ways, return_inverse=True)
    by_kind = np.array([[block_counts(workload.model, layer, int(tp)) for tp in tps] for layer in kinds])[:, tp_index]
    sums = np.einsum("rkn,knc->crn", (stages.layers - stages.kept_layers) * num_weight_copies(table), by_kind)
    counts = BlockCounts(*sums)
    expert_ranks = table.ep * table.expert_tp
    return counts._replace(
        expert=counts.expert / expert_ranks,
        expert_scales=counts.expert_scales / table.ep,
        experts_matrices=counts.experts_matrices / table.ep,
    )


def gathered_in_fp8(workload: Workload, table: LayoutTable, stages: Stages) -> tuple[Floats, Floats]:
    """Dense and expert parameters of a rank that are gathered in 8 bits, [3, layouts]."""
    if not table.gathers_fp8.any():
        return np.zeros((3, 1)), np.zeros((3, 1))
    counts = counts_of_ranks(workload, table, stages)
    dense, expert = np.where(table.gathers_fp8, (counts.dense, counts.expert), 0.0)
    return dense, expert


def fp8_bytes(workload: Workload, table: LayoutTable, stages: Stages) -> Floats:
    """Bytes of amax histories and of scales of gathered weights, [3, layouts]."""
    delays = table.delays_fp8 & workload.stack.kernels.own_fp8
    if not (delays.any() or table.gathers_fp8.any()):
        return np.zeros((3, 1))
    counts = counts_of_ranks(workload, table, stages)
    history = np.where(delays, counts.slots * (table.fp8_amax_history_len + 3), 0.0)
    return SLOT_BYTES * (history + np.where(delays, 2.0, 1.0) * _scales(table, counts).sum(axis=0))


def agreed_scales_seconds(workload: Workload, table: LayoutTable, stages: Stages) -> Floats:
    """Seconds of the all-reduces of gathered weights' scales, once an update, [layouts]; 0 with delayed scaling."""
    rows = table.gathers_fp8 & ~table.delays_fp8
    if not rows.any():
        return np.zeros(len(table))
    num_bytes = SLOT_BYTES * _scales(table, counts_of_ranks(workload, table, stages)).max(axis=1)
    expert_ranks = table.ep * table.expert_tp
    shard = table.dp_shard * table.cp
    expert_shard = np.maximum(1, np.minimum(table.world_size // table.pp // expert_ranks, shard))
    seconds = np.zeros(len(table))
    for size, stride, sent in (
        (shard, table.tp, num_bytes[0]), (table.tp, np.ones_like(table.tp), num_bytes[0]),
        (expert_shard, expert_ranks, num_bytes[1]), (table.expert_tp, np.ones_like(table.tp), num_bytes[1]),
    ):  # fmt: skip
        seconds += np.where(sent > 0, collective_seconds(workload.cluster, "all_reduce", sent, size=size, stride=stride), 0.0)
    return np.where(rows, seconds, 0.0)


def _scales(table: LayoutTable, counts: BlockCounts) -> Floats:
    """Number of scales of dense and of expert weights that are all-gathered in fp8, [2, 3, layouts]."""
    by_row = (table.fp8_scaling == FP8_SCALINGS.index("row")) & (table.precision == PRECISIONS.index("fp8"))
    dense = np.where(by_row, counts.dense_scales, counts.matrices)
    experts = np.where(by_row, counts.expert_scales, counts.experts_matrices)
    return np.where(table.gathers_fp8 & table.scales_by_tensor, np.stack([dense, experts]), 0.0)
