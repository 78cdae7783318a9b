"""Seconds of one micro-batch on a rank or a chunk: the sum of its blocks' prices, with exposed tp, cp and ep traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from ultrascale.catalogue.network import network_kind
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.plan.constants import Constants
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.layouts import RECOMPUTE, Floats, LayoutTable
from ultrascale.plan.time.blocks import Blocks, PartSeconds, price_kept_blocks, product_derate
from ultrascale.plan.time.recompute_prices import mean_recompute_seconds
from ultrascale.plan.time.stages import Parts
from ultrascale.plan.workload import Workload
from ultrascale.work.op_builders import without_fp8
from ultrascale.work.work import input_gather

COLUMNS = {column.name: number for number, column in enumerate(fields(PartSeconds))}
SumOf = Callable[[str], Floats]
"""Sum of a column of `PartSeconds` over the parts that each rank holds, by the column's name."""


@dataclass(frozen=True)
class PassSeconds:
    """Seconds of one micro-batch, [rows, layouts]: a row is a sort of rank, or a chunk of the pipeline."""

    forward: Floats
    """Compute of the forward pass, without communication."""
    input_gradient: Floats
    weight_gradient: Floats
    recompute: Floats
    tensor_parallel: Floats
    """Exposed tp traffic of all passes together."""
    context_parallel: Floats
    expert_parallel: Floats
    forward_traffic: Floats
    """Forward-pass part of the exposed tp, cp and ep traffic."""
    forward_expert_parallel: Floats
    split_input: Floats
    """Seconds that I takes beyond its half of an unsplit backward pass (negative: less; `plan.split_backward`);
    `split_weight`: same for W."""
    split_weight: Floats

    def rows(self, which: slice) -> PassSeconds:
        """`PassSeconds` of some rows."""
        return PassSeconds(*(column[which] for column in vars(self).values()))

    @property
    def traffic(self) -> Floats:
        return self.tensor_parallel + self.context_parallel + self.expert_parallel

    @property
    def backward_traffic(self) -> Floats:
        return self.traffic - self.forward_traffic

    @property
    def compute(self) -> Floats:
        return self.forward + self.input_gradient + self.weight_gradient

    @property
    def backward(self) -> Floats:
        return self.input_gradient + self.weight_gradient + self.recompute

    @property
    def total(self) -> Floats:
        return self.compute + self.recompute + self.traffic


def pass_seconds(
    workload: Workload, table: LayoutTable, blocks: Blocks, constants: Constants, parts: Parts
) -> PassSeconds:  # fmt: skip
    """Seconds of passes on ranks or chunks that hold these `parts`.

    No sum uses einsum: its order depends on the processor, and a plan in a browser would differ in the last bit."""
    layers, embedding, head, kept = parts
    stack, some_kept = workload.stack, bool(kept.any())
    prices, in_blocks = blocks.prices, layers  # without embedding and head
    if some_kept:
        prices = np.concatenate([prices[:-3], price_kept_blocks(workload, blocks), prices[-3:]])
        in_blocks = np.concatenate([layers - kept, kept], axis=1)
    more = workload.model.num_nextn_predict_layers
    weights = np.concatenate([in_blocks, embedding[:, None], head[:, None] * (1 + more), head[:, None] * more], axis=1)

    def summed(counts: Floats) -> SumOf:
        return lambda name: _weighed(counts, np.ascontiguousarray(prices[: counts.shape[1], COLUMNS[name]])[:, blocks.shape_of])

    sum_of, of_blocks = summed(weights), summed(in_blocks)

    derate = product_derate(workload, constants)
    recompute_share = _recomputed_share(table)
    forward = derate * (sum_of("product") + sum_of("attention")) + sum_of("elementwise")
    inputs = derate * sum_of("input_gradient") + sum_of("input_elementwise")
    weight_gradient = derate * sum_of("weight_gradient") + sum_of("weight_elementwise")
    full, selective = _second_passes(stack, of_blocks, derate)
    recompute = recompute_share * full + (table.recompute == RECOMPUTE.index("selective")) * selective
    mean = None
    if table.modes:
        shape_pairs = [[shape, without_fp8(shape)] if some_kept else [shape] for shape in blocks.shapes]
        mean = np.stack([np.concatenate([mean_recompute_seconds(workload, table, shape, constants) for shape in pair], axis=1)
                         for pair in shape_pairs], axis=-1)[:, :, blocks.shape_of]  # fmt: skip

    shown, tp_forward, tp_backward = _tensor_parallel(table, stack, sum_of, constants)
    tp = tp_forward + tp_backward + recompute_share * shown * of_blocks("tp_forward")
    sums = sum_of("tp_split_sums")
    at_once = derate * sum_of("weight_gradient_in_i") + sum_of("weight_elementwise_in_i")
    split_input = at_once + sums + shown * (sum_of("tp_split_input") - sums) - tp_backward
    split_weight = sum_of("tp_split_weight") - at_once
    if table.partition_checkpoints.any():
        tp = tp + _input_gathers(workload, table, blocks, recompute_share) * layers.sum(axis=1)

    # Our selective recomputation keeps results of single operations; ring attention and the all-to-all of heads are not such.
    attention_recompute_share = recompute_share + (stack.selective == "elementwise") * (
        table.recompute == RECOMPUTE.index("selective")
    )
    cp_forward, cp_backward = _exposed_context_parallel(table, sum_of, derate, constants)
    cp = cp_forward * (1 + attention_recompute_share) + cp_backward

    # A device that finishes before Python has launched the next kernels waits for it.
    an_op = (constants.compiled_host_fraction if stack.kernels.compiled else 1.0) * workload.overheads.op_seconds
    of_ops, of_collective = an_op * sum_of("num_ops"), _collective_launch(workload, table)
    ahead, back = (of_ops + of_collective * sum_of(name) for name in ("num_collectives", "num_backward_collectives"))
    waits = an_op * of_blocks("num_ops") - full - shown * of_blocks("tp_forward") - cp_forward
    recompute = recompute + recompute_share * np.maximum(waits, 0.0)
    forward = forward + np.maximum(ahead - forward - tp_forward - cp_forward, 0.0)
    weight_gradient = weight_gradient + np.maximum(back - inputs - weight_gradient - tp_backward - cp_backward, 0.0)
    ep = sum_of("ep_forward") + sum_of("ep_backward") + recompute_share * of_blocks("ep_forward")
    if mean is not None:
        more = (mean[:, None] * in_blocks).sum(axis=2)
        recompute, tp, cp, ep = recompute + more[0], tp + shown * more[1], cp + more[2], ep + more[3]
    ahead_ep = sum_of("ep_forward")
    return PassSeconds(
        forward, inputs, weight_gradient, recompute, tp, cp, ep, tp_forward + cp_forward + ahead_ep, ahead_ep, split_input,
        split_weight,
    )  # fmt: skip


def _second_passes(stack: Stack, of_blocks: SumOf, derate: float) -> tuple[Floats, Floats]:
    """Seconds of recomputation in blocks with full and with selective recomputation, [rows, layouts]."""
    full = derate * (of_blocks("product") + of_blocks("attention")) + of_blocks("elementwise")
    if stack.stops_early:
        full = full - derate * of_blocks("last_product")
    if stack.selective == "modules":
        return full, derate * of_blocks("chosen_products") + of_blocks("chosen_elementwise")
    if stack.selective == "attention":
        return full, derate * of_blocks("attention")
    selective = of_blocks("elementwise")
    if stack.selective.endswith("-products"):  # gate and up are 0.55 of the products of a block of Llama 70B
        selective = selective + derate * (of_blocks("product") + of_blocks("grouped_product")) / 2
    if stack.selective == "wide-products":
        selective = selective + derate * of_blocks("attention")
    return full, selective


def _tensor_parallel(table: LayoutTable, stack: Stack, sum_of: SumOf, constants: Constants) -> tuple[Floats, Floats, Floats]:
    """Exposed fraction of tp traffic, [layouts], and exposed seconds in a forward and in a backward pass, [rows, layouts]. In a
    backward pass the messages of a column-parallel layer overlap with its GEMMs."""
    overlaps = (table.tp_overlap > 0) | stack.overlaps_tensor_parallel
    shown = np.where(overlaps, 1.0 - constants.tensor_parallel_hidden, 1.0)
    is_beside = overlaps | stack.sends_beside_gradients
    beside = np.where(is_beside, sum_of("tp_beside") * (1 - constants.overlap_slowdown), 0.0)
    return shown, shown * sum_of("tp_forward"), shown * (sum_of("tp_backward") - beside)


def _weighed(counts: Floats, seconds: Floats) -> Floats:
    """Sum over parts of counts [rows, parts, layouts] times seconds [parts, layouts], in the order of the parts."""
    total = counts[:, 0] * seconds[0]
    for part in range(1, counts.shape[1]):
        total += counts[:, part] * seconds[part]
    return total


def _collective_launch(workload: Workload, table: LayoutTable) -> Floats:
    """Minimum seconds of a collective inside a block (launch cost), [layouts]."""
    overheads, node = workload.overheads, workload.cluster.node
    least = overheads.collective_seconds
    if not overheads.hops_per_rank or node.inter_link is None:
        return np.full(len(table), least)
    hops = overheads.hops_per_rank * table.tp * (1 + overheads.hop_growth * table.tp**2)
    hops = hops * network_kind(node.inter_link).hop_seconds
    over_nodes = (table.pp > 1) & (table.world_size > node.num_accelerators)
    return np.where(over_nodes, np.maximum(hops, least), least)


def _input_gathers(workload: Workload, table: LayoutTable, blocks: Blocks, recompute_share: Floats) -> Floats:
    """Seconds per block to all-gather the partitioned inputs of recomputed blocks, [layouts]."""
    if table.modes:
        recompute_share = np.array([table.modes.count("full") / len(table.modes)])
    sizes = np.array([input_gather(workload.model, shape).num_bytes for shape in blocks.shapes], dtype=float)[blocks.shape_of]
    seconds = collective_seconds(workload.cluster, "all_gather", sizes, size=table.tp, stride=np.ones_like(table.tp))
    return np.where(table.partition_checkpoints > 0, recompute_share * seconds, 0.0)


def _recomputed_share(table: LayoutTable) -> Floats:
    """Fraction of blocks with full recomputation."""
    every_k = np.where(table.recompute == RECOMPUTE.index("every-k"), 1.0 / table.recompute_every, 0.0)
    return np.where(table.recompute == RECOMPUTE.index("full"), 1.0, every_k)


def _exposed_context_parallel(table: LayoutTable, sum_of: SumOf, derate: float, constants: Constants) -> tuple[Floats, Floats]:
    """Exposed seconds of context parallelism in a forward and in a backward pass, without recomputation. A ring sends the next
    keys and values while attention computes; an all-to-all or all-gather is fully exposed."""
    forward, backward = sum_of("ring_forward"), sum_of("ring_backward")
    beside = derate * sum_of("attention") * (1 - 1 / table.cp_places)

    def shown(ring: Floats, waited: Floats, room: Floats) -> Floats:
        exposed = np.maximum(ring - room, 0.0)
        return waited + exposed + constants.overlap_slowdown * (ring - exposed)

    return shown(forward, sum_of("cp_forward"), beside), shown(backward, sum_of("cp_backward"), 2.5 * beside)
