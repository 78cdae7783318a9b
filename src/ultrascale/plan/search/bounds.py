"""What a layout needs at the very least, from a few products of columns: enough to drop most layouts before they are priced.

    memory   weights, gradients and optimizer state of the fullest rank, as they stand when the optimizer steps; nothing else
    time     FLOPs with what is computed twice, at the device's full peak, and the bubble of a perfectly even pipeline

A layout is dropped if its state alone is more than the device has, or if its least time is above that of the slowest layout
worth keeping *and* some priced layout is no slower than its least time in no more than its least memory. So neither the ranking
nor the front of time and memory can change; `tests/plan/test_search.py` compares both with the search that prices everything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.columns.rank_state import rank_state
from ultrascale.plan.flops import hardware_flops_per_token
from ultrascale.plan.layouts import RECOMPUTE, SCHEDULES, LayoutTable
from ultrascale.plan.time.stages import cut_stages
from ultrascale.plan.workload import Workload
from ultrascale.spec.layout import Layout

Floats = NDArray[np.float64]
ONE_AFTER_ANOTHER = tuple(SCHEDULES.index(name) for name in ("1f1b", "afab", "interleaved"))
"""Schedules whose bubble is that of pp - 1 micro-batches, over the virtual stages; others fill it with weight gradients."""


def memory_floor(workload: Workload, table: LayoutTable) -> Floats:
    """Bytes of the training state of the fullest rank, [layouts]."""
    stages = cut_stages(workload, table)
    micro_batches = np.maximum(workload.sequences_per_batch // (table.dp * table.micro_batch_size), 1)
    state = rank_state(workload, table, stages, micro_batches)
    return np.where(stages.exists > 0, state.weights + state.optimizer + state.late_gradients, 0.0).max(axis=0)


def time_floor(workload: Workload, table: LayoutTable) -> Floats:
    """Seconds of a step on devices that reach their peak, with no communication, [layouts]."""
    peak = max(item.value for item in workload.cluster.accelerator.peak_flops.values())
    busy = _flops_per_token(workload, table) * workload.tokens_per_step / (table.world_size * peak)
    micro_batches = workload.sequences_per_batch // (table.dp * table.micro_batch_size)
    waits = np.isin(table.schedule, ONE_AFTER_ANOTHER)
    bubble = np.where(waits, (table.pp - 1) / (micro_batches * table.virtual_stages), 0.0)
    return busy * (1 + bubble)


def _flops_per_token(workload: Workload, table: LayoutTable) -> Floats:
    """Hardware FLOPs of a token: they depend on what is recomputed and on nothing else."""
    ways, which = np.unique(table.recompute * 2**20 + table.recompute_every, return_inverse=True)
    flops = [
        hardware_flops_per_token(
            workload.model,
            Layout(recompute=RECOMPUTE[way // 2**20], recompute_every=int(way % 2**20)),  # type: ignore[arg-type]
            workload.sequence_length,
            documents=workload.documents,
            masks=not (workload.stack.kernels.spans or workload.stack.kernels.masks_in_kernel),
        )
        for way in ways
    ]
    return np.array(flops)[which]
