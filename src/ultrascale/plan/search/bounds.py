"""Lower bounds of a layout's memory and time, a few products of columns: enough to drop most layouts before they are priced.

    memory   weights, gradients and optimizer state of the fullest rank, as they stand when the optimizer steps; and what it
             surely holds at once in a pass
    time     FLOPs with what is computed twice, at the device's full peak, and the bubble of a perfectly even pipeline

A layout is dropped if either is more than the device has, or if its least time is above that of the slowest layout
worth keeping *and* some priced layout is no slower than its least time in no more than its least memory. So neither the ranking
nor the front of time and memory can change; `tests/plan/test_search.py` compares both with the search that prices everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.description.layout import Layout
from ultrascale.plan.columns.rank_activations import ALL_FORWARD, least_of_blocks
from ultrascale.plan.columns.rank_state import rank_state
from ultrascale.plan.flops import hardware_flops_per_token
from ultrascale.plan.layouts import RECOMPUTE, LayoutTable, by_schedule
from ultrascale.plan.time.stages import FIRST, cut_stages
from ultrascale.plan.workload import Workload

Floats = NDArray[np.float64]
WIDE = 4
"""Bytes of an element from which one process computes with the parameters themselves."""
WAITS = by_schedule(lambda one: not one.splits_backward)
"""Schedules whose bubble is that of pp - 1 micro-batches, over the virtual stages; others fill it with weight gradients."""


def memory_floors(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats]:
    """Bytes of the training state of the fullest rank, and of all that it surely holds at once in a pass, [layouts].

    In a pass: parameters that stay gathered, what each block saves of one micro-batch (which has been everywhere when its first
    backward pass begins; on the first rank as many as there are ranks), what a block at work needs beside it, and the sums of
    gradients where many more micro-batches follow than a pipeline holds.
    """
    stages = cut_stages(workload, table)
    micro_batches = np.maximum(workload.sequences_per_batch // (table.dp * table.micro_batch_size), 1)
    state = rank_state(workload, table, stages, micro_batches)
    exists, always = stages.exists > 0, state.weights + state.optimizer
    at_rest = np.where(exists, always + state.late_gradients, 0.0).max(axis=0)
    saved, at_work = least_of_blocks(workload, table, stages)
    flight = np.ones((3, len(table)))
    flight[FIRST] = np.minimum(table.pp, micro_batches)
    computes = np.where(state.alone & (state.compute_itemsize >= WIDE), 0.0, state.compute_itemsize)
    stays = np.where(computes > 0, state.gathered_itemsize, 0.0) * (state.blocks - state.lone_experts) + computes * state.root
    gathered = np.where(state.keeps | state.alone, stays, 0.0)
    comes_again = ~ALL_FORWARD[table.schedule] | (table.pp == 1)
    sums = np.where((micro_batches > np.where(table.pp > 1, 2 * table.pp, 1)) & comes_again, state.gradients, 0.0)
    beside = np.where(state.gathers, gathered + sums, state.gradients)
    return at_rest, np.where(exists, always + beside + flight * saved + at_work, 0.0).max(axis=0)


def time_floor(workload: Workload, table: LayoutTable) -> Floats:
    """Seconds of a step on devices that reach their peak, with no communication, [layouts]."""
    peak = max(item.value for item in workload.cluster.accelerator.peak_flops.values())
    busy = _flops_per_token(workload, table) * workload.tokens_per_step / (table.world_size * peak)
    micro_batches = workload.sequences_per_batch // (table.dp * table.micro_batch_size)
    bubble = np.where(WAITS[table.schedule], (table.pp - 1) / (micro_batches * table.virtual_stages), 0.0)
    return busy * (1 + bubble)


def _flops_per_token(workload: Workload, table: LayoutTable) -> Floats:
    """Hardware FLOPs of a token: they depend on what is recomputed and on nothing else."""
    ways, which = np.unique(table.recompute * 2**20 + table.recompute_every, return_inverse=True)
    layouts = [_recomputing(RECOMPUTE[way // 2**20], int(way % 2**20)) for way in ways if not table.modes]
    if table.modes:
        layouts, which = [table.layout(0)], np.zeros(len(table), dtype=np.intp)
    masks = not (workload.stack.kernels.spans or workload.stack.kernels.masks_in_kernel)
    told = {"documents": workload.documents, "masks": masks}
    flops = [hardware_flops_per_token(workload.model, one, workload.sequence_length, **told) for one in layouts]
    return np.array(flops)[which]


def _recomputing(way: Any, every: int) -> Layout:
    return Layout(recompute=way, recompute_every=every)
