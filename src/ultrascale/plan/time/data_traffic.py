"""Traffic of data parallelism and ZeRO in a step, and its exposed part.

    stage 0      one all-reduce of the gradients                                overlaps with the last backward pass
    stage 1, 2   one all-gather of parameters, one reduce-scatter               overlap with the first forward, last backward
                 (stage 2 in buckets: a reduce-scatter every micro-batch)
    stage 3      two all-gathers and a reduce-scatter every micro-batch         overlap with every pass
    replicas     of the state (HSDP) all-reduce their gradient shards, once
    mirrors      DualPipe's two ranks of a stage exchange gradient shards after all passes: no overlap
    nanotron     ZeRO 1 all-reduces unsharded gradients after the last backward pass, and gathers parameters piece by piece

A collective is hidden up to the compute that it overlaps with. The first all-gather and the last reduction are always exposed.

If a rank has several stages of an interleaved pipeline and its parameters stay unsharded, the all-gather of one stage's
parameters overlaps with the first pp micro-batches of the stage before, and the reduction of one stage's gradients with the
last pp micro-batches of the stage after: Megatron's schedule launches the all-gather of the next stage with the first
micro-batch of this one, reduces a stage's gradients after its last micro-batch, and makes no buckets from the second stage on,
"since communication for these model chunks is overlapped with compute anyway" (its schedules.py and training.py, 2023 to 2026).

nanotron's ZeRO 1 also copies every rank's piece of every weight into place after the all-gather. Its
`ZeroDistributedOptimizer` (2024) shards each weight over the dp ranks, joins the pieces of all weights for one `all_gather`
into a list of tensors, and copies from that list into the weights: one small copy, launched from Python, for each piece,
besides the copy that torch makes out of NCCL's buffer. With 256 ranks and 100 weights that is 25,600 launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ultrascale.description.architecture.weights import layer_weights
from ultrascale.plan.columns.fp8_state import gathered_in_fp8
from ultrascale.plan.columns.rank_state import COMPUTE_BYTES, shards
from ultrascale.plan.constants import Constants
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.laws.compute import elementwise_seconds
from ultrascale.plan.layouts import Bools, Column, Floats, LayoutTable, by_schedule
from ultrascale.plan.time.passes import PassSeconds
from ultrascale.plan.time.stages import Stages, num_weight_copies
from ultrascale.plan.workload import Workload

LAUNCH_SECONDS = 5e-6
"""Seconds to launch a copy: about the host's cost of a kernel launch from PyTorch ("Accelerating PyTorch with CUDA Graphs",
2021)."""
IN_ROUNDS = by_schedule(lambda schedule: schedule.in_rounds)
COPIES = 2
"""Copies of every parameter: from NCCL's buffer into the list, and from there into the weight."""
JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Projections that share one weight if `Kernels.joins_projections`."""
MOVES = 2
"""Memory accesses of a copy: a read and a write."""
Group = tuple[Any, Any]
"""Size and stride of a group, for each layout."""


def data_parallel_seconds(
    workload: Workload,
    table: LayoutTable,
    stages: Stages,
    passes: PassSeconds,
    micro_batches: Column,
    constants: Constants,
) -> tuple[Floats, Floats]:
    """Exposed seconds of a step's all-gathers and reductions by sort of rank, and seconds of compute that they slow down.

    A step gathers once, or at ZeRO 3 in every pass; it reduces once, or at ZeRO 2 and 3 in every backward pass. The last
    backward pass also sums over replicas.
    """
    stack, zero = workload.stack, table.zero_stage
    at_once = (zero == 1) & stack.sums_whole_gradients
    gathers, reductions, copies = _traffic_of_a_step(workload, table, stages, at_once)
    per_micro_batch = zero == 3
    weight_copies = num_weight_copies(table)  # a micro-batch uses one of a rank's copies, the step ends in each
    often = np.where(per_micro_batch, micro_batches, weight_copies)
    reduces_often = np.where(
        (zero >= stack.reduces_from) & (stack.gathers == "buckets"), np.maximum(micro_batches, weight_copies), weight_copies
    )
    forward_window = constants.data_parallel_window * (passes.forward + passes.tensor_parallel / 3)
    backward_window = constants.data_parallel_window * (passes.backward + passes.tensor_parallel * 2 / 3)
    beside = stack.overlaps_data_parallel & ~at_once
    forward_window, backward_window = forward_window * beside, backward_window * beside
    edge = 1.0 / np.maximum(stages.layers.sum(axis=1), 1.0)  # the first gather and the last reduction are exposed
    in_backward = np.where(per_micro_batch, gathers, 0.0) + reductions
    chunks, more = _beside_other_chunks(workload, table, micro_batches)
    exposed_forward = _exposed(gathers, forward_window, gathers * edge, chunks, more)
    exposed_backward = np.maximum(in_backward - backward_window, reductions * edge)
    last_backward = _exposed(in_backward + copies, backward_window, (reductions + copies) * edge, chunks, more)
    only_gathers = np.maximum(np.where(per_micro_batch, gathers, 0.0) - backward_window, 0.0)
    exposed = often * exposed_forward + (reduces_often - weight_copies) * exposed_backward + weight_copies * last_backward
    exposed = exposed + np.where(
        per_micro_batch & (reduces_often == weight_copies), (micro_batches - weight_copies) * only_gathers, 0.0
    )
    total = often * gathers + (reduces_often - weight_copies) * in_backward + weight_copies * (in_backward + copies)
    exchange = _mirror_seconds(workload, table, stages)
    exposed, total = exposed + exchange, total + exchange
    return exposed, constants.overlap_slowdown * np.maximum(total - exposed, 0.0)


def _traffic_of_a_step(workload: Workload, table: LayoutTable, stages: Stages, at_once: Bools) -> tuple[Floats, Floats, Floats]:
    """Seconds of a step's collectives without overlap, [sorts of rank, layouts], each once for all buckets of one copy of a
    rank's stages: all-gather of parameters and reduction of gradients over the shard group, and all-reduce of gradient shards
    over replicas of the state. `at_once`: layouts whose unsharded gradients are reduced in one message."""
    cluster, is_sharded = workload.cluster, table.zero_stage > 0
    reduce_bytes = np.minimum(workload.stack.reduce_bytes, table.reduce_itemsize)
    itemsize = COMPUTE_BYTES[table.precision]
    gathers, reductions, copies = np.zeros((3, 3, len(table)))
    for parameters, narrow, shard, copy in _sorts_of_parameters(workload, table, stages):
        buckets = np.where(at_once, 1.0, _num_buckets(workload, table, parameters, reduce_bytes, stages))
        size, stride = shard
        whole = parameters / buckets
        gathered = (
            parameters * itemsize - narrow * (itemsize - table.narrow_bytes) if narrow.any() else parameters * itemsize
        ) / buckets
        gather = collective_seconds(cluster, "all_gather", gathered, size=size, stride=stride)
        reduce = collective_seconds(cluster, "reduce_scatter", whole * reduce_bytes, size=size, stride=stride)
        if at_once.any():
            summed = collective_seconds(cluster, "all_reduce", whole * reduce_bytes, size=size, stride=stride)
            reduce = np.where(at_once, summed, reduce)
        gathers += np.where(is_sharded, gather, 0.0) * buckets
        reductions += np.where(is_sharded, reduce, 0.0) * buckets
        local = np.where(is_sharded, whole / size, whole)
        copy_size = np.where(is_sharded, copy[0], size * copy[0])
        copy_stride = np.where(is_sharded, copy[1], stride)
        copies += collective_seconds(cluster, "all_reduce", local * reduce_bytes, size=copy_size, stride=copy_stride) * buckets
    if at_once.any():
        gathers += np.where(at_once, copy_seconds(workload, table, stages, itemsize), 0.0)
    return gathers, reductions, copies


def _sorts_of_parameters(
    workload: Workload, table: LayoutTable, stages: Stages
) -> Iterator[tuple[Floats, Floats, Group, Group]]:
    """For dense parameters and for experts: their number, the number gathered in fp8, and (size, stride) of the shard and the
    replica group."""
    in_fp8 = [narrow / num_weight_copies(table) for narrow in gathered_in_fp8(workload, table, stages)]
    shard = (table.dp_shard * table.cp, table.tp)
    yield stages.dense_parameters, in_fp8[0], shard, (table.dp // table.dp_shard, table.tp * table.cp * table.dp_shard)
    if stages.expert_parameters.any():
        expert_ranks = table.ep * table.expert_tp
        group = table.tp * table.cp * table.dp // expert_ranks
        size = np.gcd(np.maximum(1, group), shard[0])
        yield stages.expert_parameters, in_fp8[1], (size, expert_ranks), (np.maximum(1, group // size), expert_ranks * size)


def _exposed(busy: Floats, window: Floats, least: Floats, chunks: Floats, more: Floats) -> Floats:
    """Exposed seconds of the traffic of all chunks of a rank.

    `window`: seconds of one micro-batch's pass through all chunks; `more`: micro-batches of a chunk that overlap with the next
    chunk's traffic. The first chunk's traffic overlaps only with one micro-batch of its own.
    """
    first = (busy - window) / chunks
    last = busy - window * ((chunks - 1) * more + 1) / chunks
    return np.maximum(np.maximum(first, last), least)


def _beside_other_chunks(workload: Workload, table: LayoutTable, micro_batches: Column) -> tuple[Floats, Floats]:
    """Number of chunks of a rank whose traffic overlaps with each other's compute, and micro-batches of a chunk in a row."""
    apart = IN_ROUNDS[table.schedule] & (table.pp > 1) & (table.zero_stage < 3)
    chunks = np.where(apart & (workload.stack.gathers == "whole"), table.virtual_stages, 1).astype(float)
    return chunks, np.minimum(table.pp, micro_batches).astype(float)


def _num_buckets(workload: Workload, table: LayoutTable, parameters: Floats, reduce_bytes: Column, stages: Stages) -> Floats:
    """Number of collectives (buckets) that reduce a rank's gradients."""
    stack = workload.stack
    if stack.bucket_parameters and not stack.overlaps_data_parallel:
        return np.ones_like(parameters)
    if stack.bucket_parameters:
        size = np.maximum(stack.bucket_parameters, stack.bucket_parameters_per_rank * table.dp * table.cp)
        return np.maximum(np.ceil(parameters / size), 1.0)
    if stack.bucket_bytes:
        return np.maximum(np.ceil(parameters * reduce_bytes / stack.bucket_bytes), 1.0)
    return np.maximum(stages.layers.sum(axis=1), 1.0)


def _mirror_seconds(workload: Workload, table: LayoutTable, stages: Stages) -> Floats:
    """Seconds in which mirror ranks (which hold the same stages) exchange gradients, by sort of rank, [3, layouts]; all at the
    distance of the pipeline's ends."""
    mirrored = num_weight_copies(table) > 1
    if not mirrored.any():
        return np.zeros((3, 1))
    dense, expert, shard, expert_shard = shards(table, stages)
    num_bytes = (dense / shard + expert / expert_shard) * workload.stack.gradient_bytes
    stride = (table.pp - 1) * (table.world_size // table.pp)
    size = np.where(mirrored, 2, 1)
    return collective_seconds(workload.cluster, "all_reduce", num_bytes, size=size, stride=np.maximum(stride, 1))


def copy_seconds(workload: Workload, table: LayoutTable, stages: Stages, itemsize: Floats) -> Floats:
    """Seconds of nanotron's copies after the all-gather by sort of rank, [3, layouts]; 0 if one rank holds all. `itemsize`:
    bytes of a parameter."""
    ranks = table.dp_shard * table.cp
    weights = stages.layers.sum(axis=1) * _weights_of_block(workload) + stages.has_embedding + 2 * stages.has_head
    parameters = stages.dense_parameters + stages.expert_parameters
    moved = elementwise_seconds(workload.accelerator, COPIES * MOVES * itemsize * parameters)
    return np.where(ranks > 1, np.maximum(moved, LAUNCH_SECONDS * ranks * weights), 0.0)


def _weights_of_block(workload: Workload) -> int:
    names = [weight.name.split(".")[-2] for weight in layer_weights(workload.model, 0)]
    return len({JOINED.get(name, name) for name in names} if workload.stack.kernels.joins_projections else names)
