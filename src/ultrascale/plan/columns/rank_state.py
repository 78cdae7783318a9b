"""Training state of a rank, for whole tables of layouts: weights, gradients, optimizer state.

Columns are [3, layouts]: the first, a middle and the last rank of the pipeline. P: parameters of a rank. n: ranks that shard
one replica of the training state (dense weights: dp_shard x cp; experts: a smaller group).

    stack     weights        gradients                    master and moments
    buckets   -              4 P/n, 4 P if accumulated    12 P/n
    whole     2 P            4 P                          12 P/n           (ZeRO 1, "distributed optimizer")
    whole     2 P/n          2 P/n (DeepSpeed's are bf16) 12 P/n           (ZeRO 3; gathered block by block)

Rajbhandari et al. 2020; playbook, "ZeRO".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.description.layout import DTYPE_BYTES
from ultrascale.plan.columns.fp8_state import gathered_in_fp8
from ultrascale.plan.layouts import PRECISIONS, Bools, Column, Floats, LayoutTable
from ultrascale.plan.time.stages import Stages, block_parameters, num_weight_copies, outside_parameters, parameters_by_kind
from ultrascale.plan.workload import Workload

MASTER_BYTES = {"fp64": 8}
"""Bytes of a master parameter by precision; 4 for all others."""
MASTERS = np.array([MASTER_BYTES.get(name, 4) for name in PRECISIONS], dtype=float)
COMPUTE_BYTES = np.array([DTYPE_BYTES[name] for name in PRECISIONS], dtype=float)
"""Compute and master bytes, by number of the precision."""


@dataclass(frozen=True)
class RankState:
    """Bytes per rank. A `Floats` is [3, layouts] or broadcasts to it."""

    weights: Floats
    """Compute copies that stay between steps, or master weights if those are all-gathered."""
    gradients: Floats
    """Summed gradients during gradient accumulation, kept through all passes."""
    late_gradients: Floats
    """Summed gradients at the end of a step, when the optimizer reads them."""
    optimizer: Floats
    """Moments, and master weights if separate compute copies are kept."""
    compute_itemsize: Floats
    gathered_itemsize: Floats
    """Mean bytes of an all-gathered parameter of the blocks: below `compute_itemsize` where some are gathered in fp8."""
    bucket_itemsize: Floats
    """Bytes of an all-gathered parameter of the largest bucket."""
    block: Floats
    """Parameters of one bucket, which are gathered and whose gradients are reduced together."""
    block_experts: Floats
    """Part of `block` in routed experts."""
    blocks: Floats
    """Parameters of all blocks of a rank."""
    experts: Floats
    """Part of `blocks` in routed experts."""
    lone_experts: Floats
    """Part of `experts` that FSDP does not shard, because no other rank has a replica."""
    stage_blocks: Floats
    """Blocks of the largest stage of a rank."""
    root: Floats
    """Parameters outside the blocks."""
    shard: Floats
    """Ranks that shard dense parameters (n)."""
    expert_shard: Floats
    """Ranks that shard expert parameters (n)."""
    gathers: Bools
    """True where parameters are all-gathered bucket by bucket, [layouts]."""
    keeps: Bools
    """True where all-gathered parameters stay unsharded over a step (ZeRO 0 to 2)."""
    alone: Bools
    """True for a single process, without collectives of data parallelism."""
    reduce_itemsize: Floats


def rank_state(workload: Workload, table: LayoutTable, stages: Stages, micro_batches: Column) -> RankState:
    """Training state of every layout of `table`."""
    stack = workload.stack
    compute, master = COMPUTE_BYTES[table.precision], MASTERS[table.precision]
    wide = compute >= master
    dense, expert, shard, expert_shard = shards(table, stages)
    root = stages.root_parameters * num_weight_copies(table)
    if workload.model.num_nextn_predict_layers:
        joins, embedding = _prediction_parameters(workload, table, stages)
        dense, root = dense + joins + embedding, root + embedding
    total, sharded = dense + expert, dense / shard + expert / expert_shard
    in_buckets = stack.gathers == "buckets"
    gathers = np.full(len(table), in_buckets) | ((table.zero_stage == 3) & (shard > 1))
    alone = table.dp * table.cp == 1
    moments = stack.moment_bytes / 4 * master * sharded
    if stack.optimizer == "muon":  # embedding and head are AdamW's, with two moments
        moments = moments + master * root / shard

    grows = table.zero_stage < stack.reduces_from
    sharded_gradients = np.where(grows & ~gathers, total, sharded)
    whole_gradients = np.where(table.zero_stage >= stack.shards_gradients_from, sharded, total)
    summed = np.where(wide, compute, stack.gradient_bytes)
    widths = master / 4  # a stack's bytes are those of runs with fp32 masters; of fp64 all are twice as wide
    kept_itemsize = np.minimum(master, widths * stack.master_bytes)  # a model made in bf16 has no wider copy
    sharded_itemsize = np.minimum(master, widths * stack.gradient_bytes) if in_buckets else summed
    reduced = np.where(wide, compute, np.minimum(table.reduce_itemsize, stack.reduce_bytes)).astype(float)
    lone = np.where((expert_shard > 1) | stack.shards_lone_experts | ~gathers, 0.0, expert)
    whole_sums = np.where(table.dp * table.cp > 1, reduced, sharded_itemsize) * (
        total - lone
    )  # as wide as they will be reduced
    whole_sums = whole_sums + sharded_itemsize * lone
    partial = np.where(table.dp * table.cp > 1, reduced, sharded_itemsize) if stack.keeps_reduced else sharded_itemsize
    accumulated = np.where(micro_batches > 1, np.where(grows, whole_sums, partial * sharded), 0.0)
    one_only = wide | (table.zero_stage >= stack.shards_gradients_from)
    autograd = np.where(one_only, 0.0, stack.autograd_gradient_bytes) * total
    weights = np.where(
        gathers,
        np.where(in_buckets | wide, kept_itemsize, stack.weight_bytes) * sharded,
        np.where(wide, compute, stack.weight_bytes) * total,
    )
    masters = np.where(wide, 0.0, stack.master_bytes) * sharded
    in_host = table.offload_optimizer > 0
    leaves = in_host & gathers & stack.offloads_parameters
    narrow = sum(gathered_in_fp8(workload, table, stages)) / np.maximum(total - root, 1)
    gathered = compute - (compute - table.narrow_bytes) * narrow
    block, block_experts = _largest_block(workload, table)
    optimizer = np.where(in_host, 0.0, moments + np.where(gathers & in_buckets, 0.0, masters))
    return RankState(
        weights=np.where(leaves, 0.0, weights),
        gradients=np.where(gathers, accumulated, summed * whole_gradients + autograd),
        late_gradients=np.where(gathers, sharded_itemsize * sharded_gradients, summed * whole_gradients + autograd),
        optimizer=optimizer,
        compute_itemsize=compute,
        gathered_itemsize=gathered,
        bucket_itemsize=np.where(stages.kept_layers.sum(axis=1) > 0, compute, gathered),
        block=block * np.ones((3, 1)),
        block_experts=block_experts * np.ones((3, 1)),
        blocks=total - root,
        experts=expert,
        lone_experts=lone,
        stage_blocks=stages.chunk_layers,
        root=root,
        shard=shard,
        expert_shard=expert_shard,
        gathers=gathers,
        keeps=table.zero_stage < 3,
        alone=alone,
        reduce_itemsize=reduced,
    )


def _prediction_parameters(workload: Workload, table: LayoutTable, stages: Stages) -> tuple[Floats, Floats]:
    """Parameters that multi-token prediction adds to the rank with the head: extra layers of its blocks, and a copy of the
    embedding if that is on another stage (Megatron's mtp_process; DeepSeek-V3, section 2.2)."""
    model, last = workload.model, workload.model.num_hidden_layers
    ways, which = np.unique(table.tp, return_inverse=True)
    more = [block_parameters(model, last, int(tp))[0] - block_parameters(model, last - 1, int(tp))[0] for tp in ways]
    has_head, elsewhere = stages.has_head > 0, table.pp > 1
    joins = model.num_nextn_predict_layers * np.array(more, dtype=float)[which] * has_head
    return joins, np.where(has_head & elsewhere, outside_parameters(workload, table)[0], 0.0)


def shards(table: LayoutTable, stages: Stages) -> tuple[Floats, Floats, Floats, Floats]:
    """Dense and expert parameters of a rank, and the number of ranks that shard each."""
    is_sharded = table.zero_stage > 0
    shard = np.where(is_sharded, table.dp_shard * table.cp, 1).astype(float)
    copies = table.tp * table.cp * table.dp // (table.ep * table.expert_tp)
    expert_shard = np.where(is_sharded, np.gcd(np.maximum(1, copies), table.dp_shard * table.cp), 1).astype(float)
    weight_copies = num_weight_copies(table)
    return stages.dense_parameters * weight_copies, stages.expert_parameters * weight_copies, shard, expert_shard


def _largest_block(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats]:
    """Parameters of the largest kind of block on one rank, and the experts' part of them."""
    dense, expert = parameters_by_kind(workload, table)
    local_expert = expert[:, None] / (table.ep * table.expert_tp)
    largest = (dense + local_expert).argmax(axis=0)
    every = np.arange(len(table))
    return (dense + local_expert)[largest, every], local_expert[largest, every]
