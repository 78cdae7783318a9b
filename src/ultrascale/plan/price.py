"""A whole table of layouts priced at once: where the time of a step goes, and what memory it takes.

    one micro-batch on a rank   blocks x (products, attention, element-wise work, recomputation, exposed traffic of tp, cp and ep)
    one step on a rank          micro-batches x that + gathers and reductions of data parallelism that nothing hides
    one step                    the slowest rank + what it waits for (the bubble, sends, stragglers) + the optimizer

The parts of `PriceTable.waterfall` sum to `step_seconds`. `predict` prices one layout, its pipeline simulated action by action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.blocks import Blocks, PartSeconds, price_blocks
from ultrascale.plan.collectives import collective_seconds, send_seconds
from ultrascale.plan.compute import optimizer_seconds
from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.footprint import Footprint, stage_memory
from ultrascale.plan.layouts import RECOMPUTE, SCHEDULES, LayoutTable
from ultrascale.plan.stages import FIRST, LAST, MIDDLE, Stages, cut_stages
from ultrascale.plan.time import hardware_flops_per_token, model_flops_per_token
from ultrascale.plan.workload import Workload
from ultrascale.spec.layout import Layout

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
PARTS = (
    "compute", "recompute", "tensor_parallel", "context_parallel", "expert_parallel", "data_parallel", "pipeline_sends",
    "bubble", "optimizer", "rest",
)  # fmt: skip


@dataclass(frozen=True)
class PriceTable:
    """What every layout of a table costs. Seconds of a step by part (`PARTS`), each a column; they sum to `step_seconds`."""

    workload: Workload
    table: LayoutTable
    step_seconds: Floats
    waterfall: dict[str, Floats]
    memory: Footprint
    num_micro_batches: Counts

    @property
    def tokens_per_second(self) -> Floats:
        return self.workload.tokens_per_step / self.step_seconds

    @property
    def fits(self) -> NDArray[np.bool_]:
        return self.memory.fits

    def mfu(self, *, full_attention: bool = False, peak: float | None = None) -> Floats:
        """Model FLOPs over the dense bf16 peak (or `peak`, FLOPs per second), attention causal or as the full square."""
        flops = model_flops_per_token(self.workload.model, self.workload.sequence_length, full_attention=full_attention)
        peak = peak or self.workload.cluster.accelerator.peak_flops_per_second("bf16")
        return flops * self.tokens_per_second / self.table.world_size / peak

    def row(self, index: int) -> Prediction:
        """One layout's price."""
        parts = {name: float(column[index]) for name, column in self.waterfall.items()}
        return Prediction(
            self.workload, self.table.layout(index), float(self.step_seconds[index]), parts, self.memory.row(index),
            int(self.num_micro_batches[index]),
        )  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """One layout's price."""

    workload: Workload
    layout: Layout
    step_seconds: float
    waterfall: dict[str, float]
    memory: Footprint
    """Of one row."""
    num_micro_batches: int

    @property
    def tokens_per_second(self) -> float:
        return self.workload.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.layout.world_size

    def mfu(self, *, full_attention: bool = False, peak: float | None = None) -> float:
        """Model FLOPs over the dense bf16 peak (or `peak`, FLOPs per second), attention causal or as the full square."""
        flops = model_flops_per_token(self.workload.model, self.workload.sequence_length, full_attention=full_attention)
        peak = peak or self.workload.cluster.accelerator.peak_flops_per_second("bf16")
        return flops * self.tokens_per_second_per_gpu / peak

    def hfu(self) -> float:
        """Hardware FLOPs over the dense bf16 peak."""
        masks = self.workload.documents and not self.workload.stack.kernels.masks_in_kernel
        flops = hardware_flops_per_token(self.workload.model, self.layout, self.workload.sequence_length, documents=masks)
        return flops * self.tokens_per_second_per_gpu / self.workload.cluster.accelerator.peak_flops_per_second("bf16")


def predict(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> Prediction:
    """The price of one layout."""
    return price(workload, LayoutTable.of([layout]), constants).row(0)


def price(workload: Workload, table: LayoutTable, constants: Constants = CONSTANTS) -> PriceTable:
    """The price of every layout of `table`, which must be legal for the workload (`plan.space`, `spec.rules`)."""
    stages = cut_stages(workload, table)
    seconds, waterfall = price_time(workload, table, stages, constants)
    micro_batches = workload.sequences_per_batch // (table.dp * table.micro_batch_size)
    return PriceTable(workload, table, seconds, waterfall, stage_memory(workload, table, stages), micro_batches)


def price_time(
    workload: Workload, table: LayoutTable, stages: Stages, constants: Constants = CONSTANTS
) -> tuple[Floats, dict[str, Floats]]:
    """Seconds of a step of every layout, and where they go."""
    blocks = price_blocks(workload, table)
    micro_batches = workload.sequences_per_batch // (table.dp * table.micro_batch_size)
    passes = _rank_passes(workload, table, blocks, stages, constants)
    data_parallel, slowed = _data_parallel(workload, table, stages, passes, micro_batches, constants)
    return _step(workload, table, stages, passes, data_parallel, slowed, micro_batches, constants)


@dataclass(frozen=True)
class _Passes:
    """Seconds of one micro-batch by sort of rank, [3, layouts]."""

    forward: Floats
    """Compute, no communication."""
    input_gradient: Floats
    weight_gradient: Floats
    recompute: Floats
    tensor_parallel: Floats
    """Exposed, all passes together."""
    context_parallel: Floats
    expert_parallel: Floats

    @property
    def compute(self) -> Floats:
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def backward(self) -> Floats:
        return self.input_gradient + self.weight_gradient + self.recompute

    @property
    def total(self) -> Floats:
        return self.compute + self.recompute + self.tensor_parallel + self.context_parallel + self.expert_parallel


def _rank_passes(workload: Workload, table: LayoutTable, blocks: Blocks, stages: Stages, constants: Constants) -> _Passes:
    stack = workload.stack
    parts = [part.at(blocks.shape_of) for part in (*blocks.block, blocks.embedding, blocks.head)]
    heads = 1 + workload.model.num_nextn_predict_layers
    weights = np.concatenate([stages.layers, stages.has_embedding[:, None], stages.has_head[:, None] * heads], axis=1)
    in_blocks = weights * (np.arange(len(parts)) < len(blocks.block))[None, :, None]

    def sum_of(name: str, counts: Floats = weights) -> Floats:
        return np.einsum("rpn,pn->rn", counts, np.stack([getattr(part, name) for part in parts]))

    derate = constants.compute_derate * stack.overheads.products
    derate *= constants.device_derates.get(workload.cluster.accelerator.name, 1.0)
    again = _recomputed_share(table)
    forward = derate * sum_of("product") + sum_of("attention") + sum_of("elementwise")
    inputs, weight_gradient = derate * sum_of("input_gradient"), derate * sum_of("weight_gradient")
    full = derate * sum_of("product", in_blocks) + sum_of("attention", in_blocks) + sum_of("elementwise", in_blocks)
    selective = sum_of("attention" if stack.selective == "attention" else "elementwise", in_blocks)
    if stack.selective == "alternate-products":
        selective = selective + derate * sum_of("product", in_blocks) / 2
    recompute = again * full + (table.recompute == RECOMPUTE.index("selective")) * selective

    shown = 1.0 - constants.tensor_parallel_hidden if stack.overlaps_tensor_parallel else 1.0
    overheads = stack.overheads
    crossed = -(-table.tp // workload.cluster.node.num_accelerators)
    latency = overheads.crossing_seconds * np.where(crossed > 1, crossed, 0) * sum_of("num_collectives")
    tp_forward, tp_backward = latency + shown * sum_of("tp_forward"), latency + shown * sum_of("tp_backward")
    tp = tp_forward + tp_backward + again * shown * sum_of("tp_forward", in_blocks)

    # A device that is faster than Python waits for it.
    host = constants.compiled_host_fraction if stack.kernels.compiled else 1.0
    launches = host * overheads.op_seconds * sum_of("num_ops") + _collective_launch(workload, table) * sum_of("num_collectives")
    forward = forward + np.maximum(launches - forward - tp_forward, 0.0)
    weight_gradient = weight_gradient + np.maximum(launches - inputs - weight_gradient - tp_backward, 0.0)

    cp = _exposed_context_parallel(table, sum_of, again)
    ep = sum_of("ep_forward") + sum_of("ep_backward") + again * sum_of("ep_forward", in_blocks)
    return _Passes(forward, inputs, weight_gradient, recompute, tp, cp, ep)


def _collective_launch(workload: Workload, table: LayoutTable) -> Floats:
    """What a collective inside a block takes at least, however small it is."""
    overheads = workload.stack.overheads
    in_pipeline = overheads.pipelined_collective_seconds + overheads.pipelined_collective_tp_seconds * table.tp**2
    return np.where(table.pp > 1, np.maximum(in_pipeline, overheads.collective_seconds), overheads.collective_seconds)


def _recomputed_share(table: LayoutTable) -> Floats:
    """Of the blocks, those computed a second time as a whole."""
    every_k = np.where(table.recompute == RECOMPUTE.index("every-k"), 1.0 / table.recompute_every, 0.0)
    return np.where(table.recompute == RECOMPUTE.index("full"), 1.0, every_k)


def _exposed_context_parallel(table: LayoutTable, sum_of: Any, again: Floats) -> Floats:
    """A ring sends the next keys and values while attention works on the last; the other two ways stand in front of it."""
    forward, backward = sum_of("cp_forward"), sum_of("cp_backward")
    attention = sum_of("attention")
    ring = table.cp_method == 0
    beside = np.where(ring, attention * (table.cp - 1) / table.cp, 0.0)
    exposed = np.maximum(forward - beside, 0.0) * (1 + again) + np.maximum(backward - 2.5 * beside, 0.0)
    return exposed


def _data_parallel(
    workload: Workload,
    table: LayoutTable,
    stages: Stages,
    passes: _Passes,
    micro_batches: Counts,
    constants: Constants,
) -> tuple[Floats, Floats]:
    """Exposed seconds of a step's gathers and reductions by sort of rank, and the compute they slow down."""
    stack, cluster = workload.stack, workload.cluster
    tp, cp = table.tp, table.cp
    world = tp * cp * table.dp
    dense_shard = (table.dp_shard * cp, tp)
    dense_copies = (table.dp // table.dp_shard, tp * cp * table.dp_shard)
    expert_cut = table.ep * table.expert_tp
    expert_group = world // expert_cut
    expert_shard = (np.maximum(1, np.minimum(expert_group, dense_shard[0])), expert_cut)
    expert_copies = (np.maximum(1, expert_group // expert_shard[0]), expert_cut * expert_shard[0])
    zero = table.zero_stage
    cut = zero > 0
    reduce_bytes = np.minimum(stack.reduce_bytes, table.reduce_itemsize)
    gather_bytes = 2.0

    gathers = np.zeros((3, len(table)))
    reductions = np.zeros((3, len(table)))
    copies = np.zeros((3, len(table)))
    for parameters, shard, copy in (
        (stages.dense_parameters, dense_shard, dense_copies),
        (stages.expert_parameters, expert_shard, expert_copies),
    ):
        if not parameters.any():
            continue
        buckets = _num_buckets(stack.bucket_bytes, parameters * reduce_bytes, stages)
        size, stride = shard
        whole = parameters / buckets
        gather = collective_seconds(cluster, "all_gather", whole * gather_bytes, size=size, stride=stride)
        reduce = collective_seconds(cluster, "reduce_scatter", whole * reduce_bytes, size=size, stride=stride)
        gathers += np.where(cut, gather, 0.0) * buckets
        reductions += np.where(cut, reduce, 0.0) * buckets
        own = np.where(cut, whole / size, whole)
        copy_size = np.where(cut, copy[0], size * copy[0])
        copy_stride = np.where(cut, copy[1], stride)
        copies += collective_seconds(cluster, "all_reduce", own * reduce_bytes, size=copy_size, stride=copy_stride) * buckets

    per_micro_batch = zero == 3
    often = np.where(per_micro_batch, micro_batches, 1)
    reduces_often = np.where((zero >= 2) & (stack.gathers == "buckets"), micro_batches, 1)
    forward_window = constants.data_parallel_window * (passes.forward + passes.tensor_parallel / 3)
    backward_window = constants.data_parallel_window * (passes.backward + passes.tensor_parallel * 2 / 3)
    if not stack.overlaps_data_parallel:
        forward_window, backward_window = np.zeros_like(forward_window), np.zeros_like(backward_window)
    blocks = np.maximum(stages.layers.sum(axis=1), 1.0)
    edge = 1.0 / blocks  # the first gather and the last reduction have nothing beside them
    in_forward = gathers
    in_backward = np.where(per_micro_batch, gathers, 0.0) + reductions
    exposed_forward = np.maximum(in_forward - forward_window, in_forward * edge)
    exposed_backward = np.maximum(in_backward - backward_window, reductions * edge)
    last_backward = np.maximum(in_backward + copies - backward_window, (reductions + copies) * edge)
    only_gathers = np.maximum(np.where(per_micro_batch, gathers, 0.0) - backward_window, 0.0)
    exposed = often * exposed_forward + (reduces_often - 1) * exposed_backward + last_backward
    exposed = exposed + np.where(per_micro_batch & (reduces_often == 1), (micro_batches - 1) * only_gathers, 0.0)
    total = often * in_forward + (reduces_often - 1) * in_backward + in_backward + copies
    slowed = constants.overlap_slowdown * np.maximum(total - exposed, 0.0)
    return exposed, slowed


def _num_buckets(bucket_bytes: int, total_bytes: Floats, stages: Stages) -> Floats:
    """Collectives that a rank's gradients are reduced in."""
    if bucket_bytes:
        return np.maximum(np.ceil(total_bytes / bucket_bytes), 1.0)
    return np.maximum(stages.layers.sum(axis=1), 1.0)


def _step(
    workload: Workload, table: LayoutTable, stages: Stages, passes: _Passes, data_parallel: Floats, slowed: Floats,
    micro_batches: Counts, constants: Constants,
) -> tuple[Floats, dict[str, Floats]]:  # fmt: skip
    """The slowest rank's own work, then what it waits for."""
    own = micro_batches * passes.total + data_parallel + slowed
    own = np.where(stages.exists > 0, own, 0.0)
    slowest = own.argmax(axis=0)

    def of_slowest(column: Floats) -> Floats:
        return np.take_along_axis(column, slowest[None], axis=0)[0]

    bubble = _bubble(table, stages, passes, of_slowest(passes.total), of_slowest(passes.weight_gradient), micro_batches)
    sends = _sends(workload, table, micro_batches, constants)
    parts = {
        "compute": micro_batches * of_slowest(passes.compute) + of_slowest(slowed),
        "recompute": micro_batches * of_slowest(passes.recompute),
        "tensor_parallel": micro_batches * of_slowest(passes.tensor_parallel),
        "context_parallel": micro_batches * of_slowest(passes.context_parallel),
        "expert_parallel": micro_batches * of_slowest(passes.expert_parallel),
        "data_parallel": of_slowest(data_parallel),
        "pipeline_sends": sends,
        "bubble": bubble,
        "optimizer": _optimizer(workload, table, stages, constants),
    }
    running = sum(parts.values())
    nodes = np.maximum(table.world_size / workload.cluster.node.num_accelerators, 1.0)
    parts["rest"] = constants.step_seconds + running * constants.straggler_per_doubling * np.log2(nodes)
    overheads = workload.stack.overheads
    if overheads.stall_nodes:
        stops = np.where(table.pp > 1, micro_batches, 1)
        parts["rest"] += np.where(nodes >= overheads.stall_nodes, overheads.stall_seconds * stops, 0.0)
    return running + parts["rest"], parts


def _bubble(
    table: LayoutTable,
    stages: Stages,
    passes: _Passes,
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


def _sends(workload: Workload, table: LayoutTable, micro_batches: Counts, constants: Constants) -> Floats:
    """Exposed activations and gradients between stages."""
    tokens = table.micro_batch_size * workload.sequence_length / table.cp
    tokens = tokens / np.where(table.sequence_parallel > 0, table.tp, 1)
    num_bytes = tokens * workload.model.hidden_size * 2.0
    one = send_seconds(workload.cluster, num_bytes, stride=table.tp * table.cp * table.dp)
    fill = 2 * (table.pp - 1) * one
    hidden = 0.0 if workload.stack.overlaps_sends else constants.send_exposed
    steady = 2 * micro_batches * table.virtual_stages * one * hidden
    overheads = workload.stack.overheads
    steady = steady + micro_batches * overheads.pipeline_seconds
    return np.where(table.pp > 1, fill + steady, 0.0)


def _optimizer(workload: Workload, table: LayoutTable, stages: Stages, constants: Constants) -> Floats:
    """The update: reads the gradient, the master and both moments, writes the last three and the compute copy."""
    stack = workload.stack
    cut = np.where(table.zero_stage > 0, table.dp_shard * table.cp, 1)
    expert_cut = np.where(
        table.zero_stage > 0, np.maximum(1, table.dp_shard * table.cp * table.tp // (table.ep * table.expert_tp)), 1
    )
    own = stages.dense_parameters / cut + stages.expert_parameters / expert_cut
    whole = stages.dense_parameters + stages.expert_parameters
    per_parameter = stack.gradient_bytes + 2 * (stack.master_bytes + stack.moment_bytes) + stack.weight_bytes
    num_bytes = (own * per_parameter + 2 * stack.gradient_bytes * np.where(table.zero_stage >= 2, own, whole)).max(axis=0)
    return optimizer_seconds(workload.cluster.accelerator, num_bytes * constants.optimizer_passes)


__all__ = ["FIRST", "LAST", "MIDDLE", "PARTS", "PartSeconds", "Prediction", "PriceTable", "predict", "price"]
