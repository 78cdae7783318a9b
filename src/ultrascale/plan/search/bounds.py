"""Cheap lower bounds of a layout's memory: weights, gradients and optimizer state of the fullest rank at the optimizer step,
and the memory that it must hold at once in a pass.

A layout is dropped if either bound exceeds the device, or if it is slower than all layouts worth keeping *and* a faster one
that fits needs no more than its bound. Neither the ranking nor the Pareto front of time and memory changes;
`tests/plan/test_search.py` compares both with the search that prices everything.
"""

from __future__ import annotations

import numpy as np

from ultrascale.plan.columns.rank_activations import ALL_FORWARD, least_of_blocks
from ultrascale.plan.columns.rank_state import RankState, rank_state
from ultrascale.plan.layouts import Column, Floats, LayoutTable
from ultrascale.plan.time.stages import FIRST, Stages, partition_stages
from ultrascale.plan.workload import Workload

WIDE = 4
"""Bytes per element from which a single process computes with the parameters themselves, without low-precision copies."""


def state_floor(workload: Workload, table: LayoutTable) -> Floats:
    """Lower bound for the fullest rank, [layouts]: bytes of the training state."""
    state, stages, _ = _state(workload, table)
    return np.where(stages.exists > 0, state.weights + state.optimizer + state.late_gradients, 0.0).max(axis=0)


def pass_floor(workload: Workload, table: LayoutTable) -> Floats:
    """Lower bound for the fullest rank, [layouts]: bytes held at once in a pass.

    These are: parameters that stay gathered; activations saved by each block for one micro-batch (at the start of the first
    backward pass; on the first pipeline rank for pp micro-batches); temporary memory of the running block; and gradient sums,
    if there are many more micro-batches than a pipeline holds.
    """
    state, stages, micro_batches = _state(workload, table)
    saved, at_work = least_of_blocks(workload, table, stages)
    flight = np.ones((3, len(table)))
    flight[FIRST] = np.minimum(table.pp, micro_batches)
    computes = np.where(state.alone & (state.compute_itemsize >= WIDE), 0.0, state.compute_itemsize)
    stays = np.where(computes > 0, state.gathered_itemsize, 0.0) * (state.blocks - state.lone_experts) + computes * state.root
    gathered = np.where(state.keeps | state.alone, stays, 0.0)
    comes_again = ~ALL_FORWARD[table.schedule] | (table.pp == 1)
    sums = np.where((micro_batches > np.where(table.pp > 1, 2 * table.pp, 1)) & comes_again, state.gradients, 0.0)
    beside = np.where(state.gathers, gathered + sums, state.gradients)
    always = state.weights + state.optimizer
    return np.where(stages.exists > 0, always + beside + flight * saved + at_work, 0.0).max(axis=0)


def _state(workload: Workload, table: LayoutTable) -> tuple[RankState, Stages, Column]:
    """Training state of each rank, the stages, and micro-batches of a step."""
    stages = partition_stages(workload, table)
    micro_batches = np.maximum(workload.sequences_per_batch // (table.dp * table.micro_batch_size), 1)
    return rank_state(workload, table, stages, micro_batches), stages, micro_batches
