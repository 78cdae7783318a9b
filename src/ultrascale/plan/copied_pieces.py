"""What nanotron's ZeRO 1 adds after it has gathered parameters: every rank's piece of every weight is copied to its place.

Its `ZeroDistributedOptimizer` (2024) cuts each weight over the ranks of data parallelism, joins the pieces of all weights for
one `all_gather` into a list of tensors, and copies from that list into the weights: one small copy, launched from Python, for
each piece, besides the copy that torch makes out of NCCL's buffer. With 256 ranks and 100 weights that is 25,600 launches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.compute import elementwise_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.stages import Stages
from ultrascale.plan.workload import Workload
from ultrascale.spec.weights import layer_weights

Floats = NDArray[np.float64]
LAUNCH_SECONDS = 5e-6
"""Of a copy: about what a kernel's launch from PyTorch costs the host ("Accelerating PyTorch with CUDA Graphs", 2021)."""
COPIES = 2
"""Of every parameter: out of NCCL's buffer into the list, and from there into the weight."""
JOINED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Products that are one weight where `Kernels.joins_projections`."""
MOVES = 2
"""A copy reads and writes."""


def copy_seconds(workload: Workload, table: LayoutTable, stages: Stages, itemsize: Floats) -> Floats:
    """Seconds of those copies by sort of rank, [3, layouts]; 0 where one rank holds all. `itemsize`: of a parameter."""
    ranks = table.dp_shard * table.cp
    weights = stages.layers.sum(axis=1) * _weights_of_block(workload) + stages.has_embedding + 2 * stages.has_head
    parameters = stages.dense_parameters + stages.expert_parameters
    moved = elementwise_seconds(workload.cluster.accelerator, COPIES * MOVES * itemsize * parameters)
    return np.where(ranks > 1, np.maximum(moved, LAUNCH_SECONDS * ranks * weights), 0.0)


def _weights_of_block(workload: Workload) -> int:
    names = [weight.name.split(".")[-2] for weight in layer_weights(workload.model, 0)]
    return len({JOINED.get(name, name) for name in names} if workload.stack.kernels.joins_projections else names)
