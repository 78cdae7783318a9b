"""What a pipeline adds to a step: the time to fill and drain it, and its messages.

For a whole table by formulas: exact for even stages, close for uneven ones. For one layout the schedule's own actions are
played, stage by stage, with every stage's own price (`plan.pipeline`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.blocks import price_blocks
from ultrascale.plan.collectives import send_seconds
from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.layouts import SCHEDULES, LayoutTable
from ultrascale.plan.passes import Passes, pass_seconds
from ultrascale.plan.pipeline import StageSeconds
from ultrascale.plan.stages import Stages, split_layers
from ultrascale.plan.workload import Workload
from ultrascale.spec.layout import Layout

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def stage_seconds(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> StageSeconds:
    """What one micro-batch costs in every stage of one layout's pipeline."""
    table = LayoutTable.of([layout])
    blocks = price_blocks(workload, table)
    chunks = split_layers(workload, layout.num_stages) if layout.layers_per_stage is None else layout.layers_per_stage
    ends = np.cumsum(chunks)
    layers = np.zeros((len(chunks), len(blocks.kinds), 1))
    for stage, (count, end) in enumerate(zip(chunks, ends, strict=True)):
        for kind in blocks.kind_of_layer[end - count : end]:
            layers[stage, kind] += 1
    embedding, head = np.zeros((len(chunks), 1)), np.zeros((len(chunks), 1))
    embedding[0] = head[-1] = 1
    passes = pass_seconds(workload, table, blocks, constants, layers=layers, embedding=embedding, head=head)
    traffic = passes.tensor_parallel + passes.context_parallel + passes.expert_parallel
    return StageSeconds(
        forward=passes.forward + traffic / 3,
        input_gradient=passes.input_gradient + passes.recompute + traffic * 2 / 3,
        weight_gradient=passes.weight_gradient,
        send=_one_send(workload, table),
        forward_communication=traffic / 3,
        backward_communication=traffic * 2 / 3,
        receives_block=not workload.stack.overlaps_sends,
    )


def busiest_rank_seconds(layout: Layout, seconds: StageSeconds, num_micro_batches: int) -> float:
    """The most that one rank computes in a step: the passes of its stages, all micro-batches."""
    costs = (seconds.forward, seconds.input_gradient, seconds.weight_gradient)
    of_stage = np.sum([np.asarray(cost)[:, 0] for cost in costs], axis=0)
    if layout.schedule == "dualpipe":  # every stage is on two ranks, each for half of the micro-batches
        return float((of_stage + of_stage[::-1]).max() / 2 * num_micro_batches)
    rank = np.arange(len(of_stage)) % layout.pp
    if layout.schedule in ("zb-v", "dualpipe-v"):
        rank = np.minimum(np.arange(len(of_stage)), 2 * layout.pp - 1 - np.arange(len(of_stage)))
    return float(np.bincount(rank, weights=of_stage).max() * num_micro_batches)


def without_sends(seconds: StageSeconds) -> StageSeconds:
    """The same on a network that takes no time."""
    return replace(seconds, send=0.0)


def bubble_seconds(
    table: LayoutTable,
    stages: Stages,
    passes: Passes,
    slowest: Floats,
    weight_gradient: Floats,
    micro_batches: Counts,
) -> Floats:
    """Seconds the slowest rank is idle while the pipeline fills and drains; see `plan.pipeline` for the exact simulation."""
    pp, v = table.pp, table.virtual_stages
    others = (passes.total * stages.exists).sum(axis=0) - slowest
    bubble = np.where(pp > 1, others, 0.0)
    name = table.schedule
    bubble = np.where(name == SCHEDULES.index("interleaved"), bubble / v, bubble)
    remainder = micro_batches % pp
    ragged = (name == SCHEDULES.index("interleaved")) & (remainder > 0) & (pp > 1)
    bubble = bubble + np.where(ragged, (v - 1) / v * (pp - remainder) * slowest, 0.0)
    bubble = np.where(name == SCHEDULES.index("zb-h1"), np.maximum(bubble - 2 * (pp - 1) * weight_gradient, 0.0), bubble)
    v_shaped = (
        (name == SCHEDULES.index("zb-v")) | (name == SCHEDULES.index("dualpipe-v")) | (name == SCHEDULES.index("dualpipe"))
    )
    return np.where(v_shaped, np.maximum(bubble / 2 - 1.5 * (pp - 1) * weight_gradient, 0.05 * bubble), bubble)


def send_seconds_of_step(workload: Workload, table: LayoutTable, micro_batches: Counts, constants: Constants) -> Floats:
    """Exposed activations and gradients between stages."""
    one = _one_send(workload, table)
    fill = 2 * (table.pp - 1) * one
    hidden = 0.0 if workload.stack.overlaps_sends else constants.send_exposed
    steady = 2 * micro_batches * table.virtual_stages * one * hidden
    overheads = workload.stack.overheads
    steady = steady + micro_batches * overheads.pipeline_seconds
    return np.where(table.pp > 1, fill + steady, 0.0)


def _one_send(workload: Workload, table: LayoutTable) -> Floats:
    """One activation from a stage to the next, [layouts]."""
    tokens = table.micro_batch_size * workload.sequence_length / table.cp
    tokens = tokens / np.where(table.sequence_parallel > 0, table.tp, 1)
    num_bytes = tokens * workload.model.hidden_size * 2.0
    return send_seconds(workload.cluster, num_bytes, stride=table.tp * table.cp * table.dp, size=table.pp)
