"""The moments of a step at which a rank's memory can be highest, for whole tables of layouts.

A sum of parts misses what decides: at the peak some activations are gone and some gradients not yet there. Between the ends of a pass over equal
blocks memory changes evenly, so it is enough to look at its ends:

    forward         the last block of the last micro-batch that enters before one leaves
    head            the loss, forward and backward
    backward last   the last block, first on the way back: all activations, no gradients of this micro-batch
    backward next   the block before it, while the last one's gradients are reduced (FSDP)
    reduction       between those two: the last block's gradients, and the buffer they are reduced in
    backward first  the first block: few activations, gradients of all others
    outside         the embedding's gradient, and the reduction of what is outside the blocks
    optimizer       no activations; its own temporaries

FSDP's own memory (`plan.sharding` replays it move by move): parameters whole or gathered ahead, flat buffers of gathers, gradients
as autograd makes them, flat buffers of reductions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.rank_activations import RankActivations
from ultrascale.plan.rank_state import RankState
from ultrascale.plan.workload import Workload

Floats = NDArray[np.float64]
MOMENTS = (
    "forward", "head forward", "head backward", "backward last", "backward next", "reduction", "backward first", "outside",
    "optimizer",
)  # fmt: skip
ZERO = np.zeros((3, 1))


class Moment(NamedTuple):
    """Bytes beside weights and optimizer state, [3, layouts] or what broadcasts to it."""

    activations: Floats
    gathered: Floats
    """Whole parameters in the dtype of the passes."""
    gradients: Floats
    buffers: Floats
    """Flat buffers of gathers and reductions, copies that the optimizer makes."""


def rank_moments(
    workload: Workload, table: LayoutTable, state: RankState, parts: RankActivations, micro_batches: NDArray[np.int64]
) -> list[Moment]:
    """One for each of `MOMENTS`."""
    whole = _whole_moments(workload, state, parts)
    if not state.gathers.any():
        return whole
    buckets = _bucket_moments(workload, table, state, parts, micro_batches)
    return [
        Moment(*(np.where(state.gathers, ours, theirs) for ours, theirs in zip(one, other, strict=True)))
        for one, other in zip(buckets, whole, strict=True)
    ]


def _passes(parts: RankActivations) -> list[Floats]:
    """Activations at each of `MOMENTS`."""
    full = parts.waiting + parts.current
    return [
        full + parts.forward_excess,
        full + parts.head_forward,
        full + parts.head_backward,
        full + parts.backward_excess,
        full - parts.saved + parts.backward_excess,
        full - parts.saved + parts.hidden,
        parts.waiting + parts.first_backward,
        parts.waiting + parts.embedding_saved + parts.embedding_backward,
        ZERO,
    ]


def _whole_moments(workload: Workload, state: RankState, parts: RankActivations) -> list[Moment]:
    """Parameters and gradients are there throughout: Megatron, nanotron, plain DDP."""
    moments = [Moment(activations, ZERO, state.gradients, ZERO) for activations in _passes(parts)]
    return [*moments[:-1], moments[-1]._replace(gradients=state.late_gradients, buffers=_optimizer_room(workload, state))]


def _optimizer_room(workload: Workload, state: RankState) -> Floats:
    """Copies that a multi-tensor optimizer makes of what it updates."""
    own = (state.blocks + state.root) / state.shard
    return workload.stack.optimizer_temporary_bytes * own


def _bucket_moments(
    workload: Workload, table: LayoutTable, state: RankState, parts: RankActivations, micro_batches: NDArray[np.int64]
) -> list[Moment]:
    """FSDP: parameters come bucket by bucket, gradients leave so."""
    c, r, n, alone = state.compute_itemsize, state.reduce_itemsize, state.shard, state.alone
    per_bucket = np.where(alone, 1, table.layers_per_bucket)
    bucket = np.minimum(state.block * per_bucket, state.blocks)
    blocks, root = state.blocks, state.root
    copies = np.where(alone & (c >= r), 0.0, c)  # one process in one dtype computes with the parameters themselves
    cuts, keeps = n > 1, state.keeps | alone
    stays = alone | ((table.zero_stage == 2) & (micro_batches > 1))  # whole parameters outlive the bucket's reduction

    flat = np.where(cuts, c * bucket, 0.0)
    everything = copies * (blocks + root)
    gathered = np.where(keeps, everything, copies * (root + bucket))
    after_one = np.where(stays, everything, np.where(keeps, everything - copies * bucket, copies * root))
    at_first = np.where(stays, everything, copies * (root + bucket))

    summed = state.gradients  # of earlier micro-batches
    whole_sums = (micro_batches > 1) & (table.zero_stage < 2) | alone & (micro_batches > 1)
    of_head = (
        c * root * np.where(parts.head_forward > 0, np.where(parts.embedding_backward > 0, _head_share(workload), 1.0), 0.0)
    )
    own = np.where(whole_sums, 0.0, 1.0)  # whether gradients of this micro-batch are new memory once they are summed
    cut_bucket = own * np.where(alone, 4 / c * c * bucket, r * bucket / n)
    reduced = np.where(cuts, r * bucket, 0.0)
    # On one rank of n = 1 the result is the input, and torch divides through a copy.
    copy = np.where(~cuts & ~alone, r * bucket, 0.0)
    ahead = np.where(keeps, 0.0, flat)
    of_others = np.where(
        whole_sums & cuts & ~alone, summed - r * (blocks - bucket) * (1 - 1 / n), summed + own * r * (blocks - bucket) / n
    )
    of_others = np.where((table.zero_stage >= 2) & (micro_batches > 1), summed, of_others)
    held = (per_bucket - 1) * c * state.block

    activations = _passes(parts)
    narrow = np.where(whole_sums, 0.0, c * bucket)
    forward_flat = np.where(keeps, np.where(micro_batches > 1, 0.0, flat), flat)
    return [
        Moment(activations[0], gathered, summed, forward_flat),
        Moment(activations[1], np.where(keeps, everything, copies * root), summed, forward_flat),
        Moment(activations[2], np.where(keeps, everything, copies * root), summed, ahead),
        Moment(activations[3], gathered, summed + of_head, ahead),
        Moment(activations[4] + held, at_least(after_one + np.where(keeps, 0.0, copies * bucket)), summed + of_head + cut_bucket, reduced + ahead),
        Moment(activations[5], after_one, summed + of_head + narrow + cut_bucket + np.where(cuts, 0.0, 0.0), reduced + copy + ahead),
        Moment(activations[6] + held, at_first, of_others + of_head, reduced),
        Moment(activations[7], np.where(stays, everything, 0.0), of_others + of_head, np.where(cuts, r * root, 0.0) + np.where(~cuts & ~alone, r * root, 0.0)),
        Moment(ZERO, np.where(alone, everything, 0.0), state.late_gradients, _optimizer_room(workload, state)),
    ]  # fmt: skip


def at_least(column: Floats) -> Floats:
    return np.maximum(column, 0.0)


def _head_share(workload: Workload) -> float:
    """Of the parameters outside the blocks, those on the side of the head, if both sides are on one rank."""
    return 1.0 if workload.model.tie_word_embeddings else 0.5
