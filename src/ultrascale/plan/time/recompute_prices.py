"""Cost of recomputing operations of a block: their forward prices, from `plan.time.blocks`."""

from __future__ import annotations

import numpy as np

from ultrascale.plan.constants import Constants
from ultrascale.plan.layouts import Floats, LayoutTable
from ultrascale.plan.time.blocks import kinds_of_layers, price_ops, product_derate
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Op, Shape
from ultrascale.work.recompute import recompute_of_mode, recomputed_ops, reruns_last
from ultrascale.work.work import block_work


def forward_seconds(workload: Workload, shape: Shape, ops: tuple[Op, ...], constants: Constants) -> Floats:
    """Forward seconds of `ops` for one micro-batch on one rank: [compute, tp traffic, exposed cp traffic, ep traffic]."""
    part = price_ops(workload, shape, ops)
    derate = product_derate(workload, constants)
    attention = derate * part.attention
    ring = np.maximum(part.ring_forward - attention * (1 - 1 / shape.cp_grid[0]), 0.0)
    compute = derate * part.product + attention + part.elementwise
    return np.array([compute, part.tp_forward, part.cp_forward + ring, part.ep_forward])[:, 0]


def mean_recompute_seconds(workload: Workload, table: LayoutTable, shape: Shape, constants: Constants) -> Floats:
    """Mean seconds that recomputation adds to a block of each kind, [4, kinds], with the rows of `forward_seconds`; for a table
    whose layouts set recomputation block by block."""
    kinds, kind_of_layer = kinds_of_layers(workload.model)
    of_mode = {
        (mode, kind): _of_block(workload, shape, layer, mode, constants)
        for mode in dict.fromkeys(table.modes)
        for kind, layer in enumerate(kinds)
    }
    modes = table.modes_of_blocks(len(kind_of_layer))
    costs = [[of_mode[mode, kind] for mode, layer_kind in zip(modes, kind_of_layer, strict=False) if layer_kind == kind]
             for kind in range(len(kinds))]  # fmt: skip
    return np.array([np.mean(rows, axis=0) for rows in costs]).T


def _of_block(workload: Workload, shape: Shape, layer: int, mode: str, constants: Constants) -> Floats:
    ops = block_work(workload.model, layer, shape)
    recomputation = recompute_of_mode(mode, workload.model, layer, shape, workload.stack)
    run = recomputed_ops(recomputation, ops, reruns_last=reruns_last(ops, tp=shape.tp, splits=False))
    return forward_seconds(workload, shape, tuple(run), constants) if run else np.zeros(4)
