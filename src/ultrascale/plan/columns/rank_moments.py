"""The moments of a step at which a rank's memory can peak, for whole tables of layouts.

A sum of parts misses the peak, where some activations are already freed and some gradients not yet allocated. Memory changes
linearly over a pass through equal blocks, so only its ends matter:

    forward         the last block of the last micro-batch that enters before one leaves
    head            the loss, forward and backward
    backward last   the last block, first in the backward pass: all activations, no gradients of this micro-batch
    backward next   the block before it, while the last one's gradients are reduced (FSDP)
    reduction       between those two: the last block's gradients, and the buffer of their reduction
    backward first  the first block: few activations, gradients of all others
    outside         the embedding's gradient, and the reduction of gradients outside the blocks
    input last      split backward pass, in I: the last block
    input first     in I: the first block; tensors that the others keep for W replace their activations
    weights first   start of W: all tensors kept for it, and no weight gradient
    weights last    end of W: no kept tensors of its micro-batch, and all weight gradients, not yet reduced
    optimizer       no activations; the optimizer's temporaries

FSDP's memory (replayed in detail by `plan.memory.sharding`): unsharded or prefetched parameters, flat buffers of all-gathers,
gradients from autograd, flat buffers of reductions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ultrascale.plan.columns.rank_activations import RankActivations
from ultrascale.plan.columns.rank_loads import PASSES
from ultrascale.plan.columns.rank_state import MASTERS, RankState
from ultrascale.plan.layouts import Bools, Column, Floats, LayoutTable
from ultrascale.plan.time.stages import num_weight_copies
from ultrascale.plan.workload import Workload

MOMENTS = (*PASSES, "optimizer")
NOTHING = np.zeros((3, 1))
MASTER_BYTES = 4
"""Bytes of a master parameter, or of its gradient, for a single process in mixed precision."""


class Moment(NamedTuple):
    """Bytes besides weights and optimizer state at one moment, [3, layouts] or broadcastable to it."""

    activations: Floats
    gathered: Floats
    """Unsharded parameters in the compute dtype."""
    gradients: Floats
    buffers: Floats
    """Flat buffers of all-gathers and reductions, and the optimizer's temporary copies."""
    aside: Floats
    """Part of gradients and buffers that other streams than the compute stream allocated."""
    late: Floats = NOTHING
    """Part of all these that fits into no segment of activations: `late_bytes`."""


def rank_moments(
    workload: Workload, table: LayoutTable, state: RankState, parts: RankActivations, micro_batches: Column
) -> list[Moment]:
    """Memory at each of `MOMENTS`."""
    room = _optimizer_room(workload, table, state)
    if not state.gathers.any():
        return _whole_moments(state, parts, room)
    buckets = _bucket_moments(workload, _fsdp(workload, table, state, parts, micro_batches), state, parts, room)
    if state.gathers.all():
        return buckets
    return [
        Moment(*(np.where(state.gathers, ours, theirs) for ours, theirs in zip(bucketed, whole, strict=True)))
        for bucketed, whole in zip(buckets, _whole_moments(state, parts, room), strict=True)
    ]


def _passes(parts: RankActivations) -> list[Floats]:
    """Activations at each of `MOMENTS`."""
    most = {name: parts.at[name].max(axis=1) for name in PASSES}
    most["outside"] = most["outside"] + parts.embedding_backward
    return [*most.values(), NOTHING]


def _whole_moments(state: RankState, parts: RankActivations, room: Floats) -> list[Moment]:
    """Memory at each of `MOMENTS` for unsharded parameters and gradients: Megatron, nanotron, plain DDP."""
    moments = [Moment(activations, NOTHING, state.gradients, NOTHING, NOTHING) for activations in _passes(parts)]
    return [*moments[:-1], moments[-1]._replace(gradients=state.late_gradients, buffers=room)]


def _optimizer_room(workload: Workload, table: LayoutTable, state: RankState) -> Floats:
    """Bytes of temporary copies that a multi-tensor optimizer makes."""
    stack, updated = workload.stack, (state.blocks + state.root) / state.shard
    if stack.updated_together:
        updated = np.where(state.keeps, updated, np.minimum(updated, stack.updated_together))
    in_host = (table.offload_optimizer > 0) & (stack.name != "ultrascale")
    return np.where(in_host, 0.0, stack.optimizer_temporary_bytes * updated)


class _Fsdp(NamedTuple):
    """Bytes of FSDP's tensors, [3, layouts] or broadcastable to it; a single process in mixed precision has some too."""

    all_parameters: Floats
    """All parameters unsharded, in the compute dtype."""
    bucket_parameters: Floats
    root_parameters: Floats
    flat: Floats
    """Output of an all-gather, not yet copied out."""
    flat_beside: Floats
    """`flat` during a reduction: with a separate bucket for experts, that of the smaller of a block's two buckets."""
    narrow_bucket: Floats
    """Gradients of a bucket in autograd's dtype."""
    narrow_root: Floats
    """Gradients of parameters outside the blocks in autograd's dtype, kept until all of them exist."""
    narrow_head: Floats
    """Part of `narrow_root` that exists before the first block's gradients."""
    narrow_largest: Floats
    """Gradient of one weight outside the blocks, which outlives its reduction briefly."""
    narrow_embedding: Floats
    """Gradient of the embedding in autograd's dtype, on ranks that hold it."""
    reduce_bucket: Floats
    """Buffer of a bucket's reduction, unless it is the result itself."""
    reduce_root: Floats
    copy_bucket: Floats
    """Copy through which torch divides gradients if there is no reduce-scatter."""
    copy_root: Floats
    sharded_bucket: Floats
    """Gradient shards that a bucket adds in this micro-batch, and the buffer of its reduction if that stays."""
    sharded_root: Floats
    sharded_rest: Floats
    """`sharded_bucket` of all blocks except those of one bucket."""
    summed: Floats
    """Gradients of earlier micro-batches."""
    summed_at_first: Floats
    """Part of `summed` left at the first block of the last micro-batch."""
    unreduced: Floats
    """Gradients of a bucket's other blocks, not yet reduced."""
    narrow_stage: Floats
    """Gradients of all blocks of a stage except experts': W computes them one by one, and reduces them at the end."""
    pending: Floats
    """Gradients of experts, computed in I and reduced in W; kept in the reduction's dtype until then."""
    blocks_between: Floats
    """Blocks of a bucket minus one."""
    at_end: Bools
    """True where gradients are reduced only in the last backward pass."""
    keeps: Bools
    stays: Bools
    """True where unsharded parameters outlive the backward pass of their bucket."""
    first_of_two: Bools
    """True for ZeRO 2 with two micro-batches: the first keeps parameters in its backward pass, and its gradients exist during
    the second."""
    forward_flat: Floats
    """Bytes of a flat buffer at the forward peak: if parameters stay unsharded, only the first pass has one."""

    @property
    def root_reduced(self) -> Floats:
        """Gradients outside the blocks while they are reduced."""
        return np.maximum(self.narrow_root, self.sharded_root + self.copy_root + self.narrow_largest)


def _fsdp(workload: Workload, table: LayoutTable, state: RankState, parts: RankActivations, micro_batches: Column) -> _Fsdp:
    c, r, n, alone = state.compute_itemsize, state.reduce_itemsize, state.shard, state.alone
    flat = np.where(n > 1, state.bucket_itemsize, 0.0)
    wide = np.where(alone, np.maximum(c, MASTER_BYTES), r)  # of a summed gradient
    per_bucket = np.where(alone, 1, table.layers_per_bucket)
    held_stages = table.virtual_stages * num_weight_copies(table)
    blocks, root, expert_shard = state.blocks, state.root, np.where(n > 1, state.expert_shard, 1)
    dense, experts = ((state.block - state.block_experts) * per_bucket, state.block_experts * per_bucket)
    dense, experts = np.minimum(dense, blocks - state.experts), np.minimum(experts, state.experts)
    # Experts sharded over other ranks than the rest have a separate bucket, before that of their block.
    experts_apart = (experts > 0) & (table.tp * table.ep * table.expert_tp > 1)
    bucket, alone_experts = dense + experts, np.where(experts_apart, experts * (expert_shard > 1), 0.0)
    larger = np.where(experts_apart, np.maximum(dense, alone_experts), bucket)
    smaller = np.where(experts_apart, np.minimum(dense, alone_experts), bucket)
    others_dense, others_experts = blocks - state.experts - dense, state.experts - experts
    copies = np.where(alone & (c >= MASTER_BYTES), 0.0, c)  # one process in one dtype computes with the parameters themselves
    is_sharded, scatters = n > 1, ~alone
    repeated = micro_batches > 1
    reduces_from = workload.stack.reduces_from
    whole_sums = repeated & ((table.zero_stage < reduces_from) | alone)
    adds = np.where(whole_sums, 0.0, 1.0)  # whether gradients of this micro-batch need memory of their own once summed
    fresh = np.where(whole_sums & (c >= wide), 0.0, c)  # and before: if they are not narrower, autograd adds in place
    both_ends = parts.has_head & parts.has_embedding
    half = np.where(both_ends & ((table.pp > 1) | (not workload.model.tie_word_embeddings)), 0.5, 1.0)
    ends = np.where(both_ends & (table.pp > 1), 0.5, 1.0) * root  # of one stage, which are reduced together
    waits = table.pp > 1
    to_shard = others_dense * (1 - 1 / n) + others_experts * (1 - 1 / expert_shard)
    masters = MASTERS[table.precision]
    summed_in = np.minimum(masters, masters / 4 * workload.stack.gradient_bytes)
    kept = np.where(scatters & workload.stack.keeps_reduced & (r != summed_in), summed_in, 0.0)
    scattered = np.where(state.lone_experts > 0, 0.0, 1.0)
    summed_at_first = state.gradients - np.where(whole_sums & is_sharded, wide * to_shard / held_stages, 0.0)
    return _Fsdp(
        all_parameters=np.where(copies > 0, state.gathered_itemsize, 0.0) * (blocks - state.lone_experts) + copies * root,
        bucket_parameters=np.where(copies > 0, state.bucket_itemsize, 0.0) * np.where(state.lone_experts > 0, dense, bucket),
        root_parameters=copies * root,
        flat=np.where(blocks > 0, flat * larger, flat * root),
        flat_beside=flat * smaller,
        narrow_bucket=np.where(
            whole_sums | (alone & (c >= wide)), 0.0, c * np.where(experts_apart, np.maximum(dense, experts), bucket)
        ),
        narrow_root=np.where(whole_sums, 0.0, c * ends),
        narrow_head=fresh * root * np.where(parts.has_head, half, 0.0),
        narrow_embedding=np.where(parts.has_embedding, c * root * half, 0.0),
        narrow_largest=np.where(
            (scatters & ~is_sharded) | (alone & (c >= wide)), 0.0, (c + np.where(alone & whole_sums, wide, 0.0)) * root * half
        ),
        reduce_bucket=np.where(is_sharded, r * larger, 0.0),
        reduce_root=np.where(is_sharded, r * ends, 0.0),
        copy_bucket=np.where(
            scatters & ~is_sharded,
            r * bucket * (2 - adds),
            np.where(experts_apart & is_sharded & (expert_shard == 1), r * experts, 0.0),
        ),
        copy_root=np.where(scatters & ~is_sharded, r * ends * (2 - adds), 0.0),
        sharded_bucket=adds * wide * (dense / n + experts / expert_shard)
        + kept * (dense / n + scattered * experts / expert_shard),
        sharded_root=adds * wide * ends / n,
        sharded_rest=adds
        * wide
        * (others_dense / n + others_experts / expert_shard)
        * np.where(repeated & (table.zero_stage >= reduces_from) & scatters, 0.0, 1.0)
        + kept / held_stages * (others_dense / n + scattered * others_experts / expert_shard),
        summed=state.gradients,
        summed_at_first=summed_at_first,
        unreduced=(per_bucket - 1) * fresh * state.block,
        narrow_stage=np.where((whole_sums | alone) & (c >= wide), 0.0, c * (blocks - state.experts) / held_stages),
        pending=np.where(waits & ~whole_sums, r * (state.experts + np.where(parts.has_head, root * half, 0.0)), 0.0),
        blocks_between=(per_bucket - 1.0) * (blocks > bucket),
        at_end=whole_sums & ~alone,
        keeps=state.keeps | alone,
        stays=alone | ((table.zero_stage == 2) & (micro_batches > 2)),
        first_of_two=(table.zero_stage == 2) & (micro_batches == 2) & scatters,
        forward_flat=np.where(
            is_sharded,
            np.maximum(flat * np.where(blocks > 0, larger, root) - np.where(state.keeps & repeated, state.gradients, 0.0), 0.0),
            0.0,
        ),
    )


def _bucket_moments(workload: Workload, fsdp: _Fsdp, state: RankState, parts: RankActivations, room: Floats) -> list[Moment]:
    """Memory at each of `MOMENTS` for FSDP, which gathers and reduces bucket by bucket (`plan.memory.sharding`)."""
    f = fsdp
    live = _highest_activations(f, parts)
    outside = np.where(f.keeps, f.all_parameters, f.root_parameters)
    at_work = np.where(f.keeps, f.all_parameters, f.root_parameters + f.bucket_parameters)
    after_one = np.where(f.stays | ~f.keeps, outside, f.all_parameters - f.bucket_parameters)
    next_one = np.where(f.keeps, after_one, at_work)
    at_first = np.where(f.stays, f.all_parameters, f.root_parameters + f.bucket_parameters)
    forward_flat = f.forward_flat
    head_flat = np.where(
        parts.bare_head & ~f.keeps & (state.shard > 1), np.maximum(forward_flat, f.root_parameters), forward_flat
    )
    several, freed = f.blocks_between > 0, f.blocks_between * parts.saved
    at_last = np.where(several, np.maximum(live["backward last"], live["backward next"] + f.unreduced), live["backward last"])
    later = np.maximum(live["backward last"] - freed - parts.saved, live["backward next"] - freed + f.unreduced)
    at_next = np.where(several, later, live["backward next"])
    at_reduction = live["reduction"] - np.where(several, freed, 0.0)
    ahead = np.where(f.keeps, 0.0, f.flat)
    beside = np.where(f.keeps, 0.0, f.flat_beside)
    reduced_before = np.where(state.stage_blocks > f.blocks_between + 1, f.reduce_bucket, 0.0)
    early = f.summed + f.narrow_head
    pending = {name: share * f.pending for name, share in parts.pending.items()}
    late = f.summed_at_first + f.sharded_rest
    sharded = np.where(state.shard > 1, 1.0, 0.0)  # results of reductions and gathers live on streams of their own
    old = sharded * np.where(state.keeps & (state.gradients > state.late_gradients), 0.0, f.summed)
    reduced = np.maximum(f.narrow_bucket, f.sharded_bucket + f.copy_bucket)
    moments = [
        Moment(live["forward"], at_work, f.summed + pending["forward"], forward_flat, old + forward_flat),
        Moment(live["head forward"], outside, f.summed + pending["head forward"], head_flat, old + forward_flat),
        Moment(live["head backward"], outside, f.summed + pending["head backward"], ahead, old + ahead),
        Moment(at_last, at_work, early, ahead, old + ahead),
        Moment(at_next, next_one, early + f.sharded_bucket, f.reduce_bucket + beside, old + ahead),
        Moment(at_reduction, after_one, early + reduced, f.reduce_bucket + beside, old + ahead),
        Moment(live["backward first"] + f.unreduced, at_first, late + f.narrow_head, reduced_before, sharded * f.sharded_rest),
        Moment(
            live["outside"],
            np.where(f.stays, f.all_parameters, 0.0),
            late + f.sharded_bucket + f.root_reduced,
            f.reduce_root,
            sharded * (f.sharded_rest + f.sharded_bucket),
        ),
        Moment(live["input last"], at_work, early + pending["input last"], ahead, old + ahead),
        Moment(live["input first"], at_work, early + pending["input first"], ahead, old + ahead),
        Moment(live["weights first"], outside, early + pending["weights first"], NOTHING, old),
        Moment(live["weights last"], outside, early + f.narrow_stage + pending["weights last"], f.reduce_bucket, old),
        Moment(NOTHING, np.where(state.alone, f.all_parameters, 0.0), state.late_gradients, room,
               sharded * state.late_gradients),
    ]  # fmt: skip
    if not workload.stack.joins_segments:
        of_bucket, at_end = _late(f, state, parts)
        late = {"backward next": of_bucket, "reduction": of_bucket, "backward first": of_bucket, "outside": at_end}
        moments = [moment._replace(late=late.get(name, NOTHING)) for name, moment in zip(MOMENTS, moments, strict=True)]
    fresh = state.reduce_itemsize * (state.blocks - state.block) / state.shard
    for index in range(MOMENTS.index("backward next"), MOMENTS.index("input last")):
        moment = moments[index]
        fresh_shard = fresh if index >= MOMENTS.index("backward first") else 0.0
        more = np.where(f.first_of_two, np.maximum(f.all_parameters - moment.gathered - f.summed + fresh_shard, 0.0), 0.0)
        moments[index] = moment._replace(gathered=moment.gathered + more)
    return moments


def _highest_activations(f: _Fsdp, parts: RankActivations) -> dict[str, Floats]:
    """Peak activations at each moment of passes, over the times of a step. Corrected so that the other memory is equal at all
    times: minus gradient sums not yet allocated, minus reductions that occur only in the last pass."""
    reduced = {
        "backward next": f.sharded_bucket + f.reduce_bucket,
        "reduction": np.maximum(f.narrow_bucket, f.sharded_bucket + f.copy_bucket) + f.reduce_bucket,
        "backward first": f.sharded_rest + f.reduce_bucket,
        "outside": f.sharded_rest + f.sharded_bucket + f.root_reduced + f.reduce_root,
        "weights last": f.reduce_bucket,
    }
    activations = {}
    for name in PASSES:
        in_last_pass = np.where(f.at_end, reduced.get(name, 0.0), 0.0)
        first, between, last = parts.at[name].transpose(1, 0, 2)
        activations[name] = np.maximum(last, np.maximum(first, between) - in_last_pass)
    return activations


def _late(fsdp: _Fsdp, state: RankState, parts: RankActivations) -> tuple[Floats, Floats]:
    """Bytes of tensors larger than any of a block: in the buffer of a bucket's reduction, and at the end of a backward pass
    (the embedding's gradient, buffers of the reduction outside the blocks)."""

    def apart(num_bytes: Floats) -> Floats:
        return np.where(~state.alone & (num_bytes > parts.largest_tensor), num_bytes, 0.0)

    at_end = apart(fsdp.narrow_embedding) + apart(fsdp.reduce_root) + apart(fsdp.copy_root)
    return apart(fsdp.reduce_bucket), at_end


def late_bytes(moments: list[Moment]) -> Floats:
    """Bytes that the allocator takes from CUDA although segments of activations are free: segments are never joined
    (c10/cuda/CUDACachingAllocator.cpp), so a tensor larger than each of them fits into none."""
    return moments[MOMENTS.index("reduction")].late + moments[MOMENTS.index("outside")].late


def aside_bytes(state: RankState) -> Floats:
    """Bytes that streams other than the compute stream keep to the end: gradient shards, outputs of all-gathers."""
    gathered = np.maximum(state.compute_itemsize * state.root, 2 * state.bucket_itemsize * state.block)
    return np.where(state.gathers & (state.shard > 1), state.late_gradients + gathered, 0.0)
