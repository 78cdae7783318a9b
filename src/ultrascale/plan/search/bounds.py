"""Lower bounds of a layout's memory, a few products of columns: weights, gradients and optimizer state of the fullest rank, as
they stand when the optimizer steps; and what it surely holds at once in a pass.

A layout is dropped if either is more than the device has, or if it is slower than all that are worth keeping *and* some faster
one that fits needs no more than its bound. So neither the ranking nor the front of time and memory can change;
`tests/plan/test_search.py` compares both with the search that prices everything.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.columns.rank_activations import ALL_FORWARD, least_of_blocks
from ultrascale.plan.columns.rank_state import rank_state
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.stages import FIRST, partition_stages
from ultrascale.plan.workload import Workload

Floats = NDArray[np.float64]
WIDE = 4
"""Bytes of an element from which one process computes with the parameters themselves."""


def memory_floors(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats]:
    """Bytes of the training state of the fullest rank, and of all that it surely holds at once in a pass, [layouts].

    In a pass: parameters that stay gathered, what each block saves of one micro-batch (which has been everywhere when its first
    backward pass begins; on the first rank as many as there are ranks), what a block at work needs beside it, and the sums of
    gradients where many more micro-batches follow than a pipeline holds.
    """
    stages = partition_stages(workload, table)
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
