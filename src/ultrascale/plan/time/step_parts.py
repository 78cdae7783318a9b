"""The predicted step by the parts that a profiler measures (`measure.step.waterfall`): compute by kind, axes, the rest.

`plan.time.price` knows only the sum of compute. The kinds come from the same table of work and the same price functions, with
each operation stripped to one kind at a time: an operation's price is a sum over kinds, so the kinds sum to the total.

A device without catalogue rates (a CPU) has no prices: `parts_at` returns only a bound, the seconds of GEMMs and attention at a
measured rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.flops import hardware_flops
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.blocks import Blocks, compute_seconds, price_blocks, product_derate
from ultrascale.plan.time.passes import PassSeconds, pass_seconds
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.time.stages import Stages, partition_stages
from ultrascale.plan.workload import Workload
from ultrascale.work.op_builders import without_fp8
from ultrascale.work.ops import Op, Shape
from ultrascale.work.work import block_work, embedding_work, head_work, prediction_work

KINDS: dict[str, Callable[[Op], Op]] = {
    "matrix products": lambda op: replace(op, scores=None, moved_bytes=0, backward_moved_bytes=0),
    "attention": lambda op: replace(op, product=None, moved_bytes=0, backward_moved_bytes=0),
    "element-wise": lambda op: replace(op, product=None, scores=None),
}
"""Kinds of compute, each with a function that strips an operation to it."""
_PARTS = {
    "recomputation": ("recompute",), "optimizer": ("optimizer", "offload"), "dp": ("data_parallel",),
    "tp": ("tensor_parallel",), "cp": ("context_parallel",), "pp": ("pipeline_sends", "bubble"), "ep": ("expert_parallel",),
    "all ranks": ("rest",), "data wait": ("data",),
}  # fmt: skip
"""Category of each part of `plan.time.price`; time for checkpoints is not part of a profiled step."""


def step_parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step of `prediction` by category of `measure.step.categories`; they sum to its step without checkpoints.

    `launch gaps` is the time that the device waits for Python's launches. The slowdown of compute by traffic is spread over the
    kinds.
    """
    blocks, stages, passes, row = slowest_rank(prediction)
    kinds = kind_seconds(prediction.workload, blocks, stages, row)
    alone = float(passes.compute[row, 0])
    compute = prediction.waterfall["compute"]
    gaps = max(0.0, alone - sum(kinds.values())) * compute / alone
    scale = (compute - gaps) / sum(kinds.values())
    parts = {name: seconds * scale for name, seconds in kinds.items()} | {"launch gaps": gaps}
    return parts | {name: sum(prediction.waterfall[part] for part in members) for name, members in _PARTS.items()}


def slowest_rank(prediction: Prediction) -> tuple[Blocks, Stages, PassSeconds, int]:
    """Prices, stages and passes of a prediction's layout by sort of rank, and the slowest sort, whose step it is."""
    workload, layout = prediction.workload, prediction.layout
    table = LayoutTable.of([layout])
    stages, blocks = partition_stages(workload, table, layout.layers_per_stage), price_blocks(workload, table)
    passes = pass_seconds(workload, table, blocks, CONSTANTS, stages.parts)
    return blocks, stages, passes, int(np.where(stages.exists > 0, passes.total, 0.0)[:, 0].argmax())


def kind_seconds(workload: Workload, blocks: Blocks, stages: Stages, row: int) -> dict[str, float]:
    """Seconds of a micro-batch by kind of compute, forward and backward, on a rank of sort `row`, for a table of one layout."""
    shape = blocks.shapes[0]
    derate = product_derate(workload, CONSTANTS)
    seconds = {}
    for name, only in KINDS.items():
        seconds[name] = 0.0
        for count, ops, is_head in works(workload, blocks, stages, row):
            seconds[name] += count * compute_seconds(workload, shape, map(only, ops), is_head).total(derate)
    return seconds


def parts_at(
    model: Model, layout: Layout, *, sequence_length: int, tokens_per_rank: float, flops_per_second: float, documents: bool
) -> dict[str, float]:
    """Seconds of GEMMs and attention at `flops_per_second`: a bound for a device without published rates."""
    by_kind = hardware_flops(model, layout, Shape(1, sequence_length, documents=documents))
    share = 1 / (layout.tp * layout.cp * layout.pp)
    return {name: flops * tokens_per_rank * share / flops_per_second for name, flops in by_kind.items()}


def works(workload: Workload, blocks: Blocks, stages: Stages, row: int) -> Iterator[tuple[float, tuple[Op, ...], bool]]:
    """Work of a rank of sort `row` in a micro-batch, for a table of one layout: for each kind of block, in fp8 and kept in
    bf16, and for the ends, in the order of `plan.time.passes`: their number; their operations; and True for the head."""
    model, shape, more = workload.model, blocks.shapes[0], workload.model.num_nextn_predict_layers
    head, kept = stages.has_head[row, 0], stages.kept_layers[row, :, 0]
    counts = [*(stages.layers[row, :, 0] - kept), *kept, stages.has_embedding[row, 0], head * (1 + more), head * more]
    predicts = prediction_work(model, shape) if more else ()
    parts = [
        (block_work(model, layer, block_shape), False) for block_shape in (shape, without_fp8(shape)) for layer in blocks.kinds
    ]
    ends = [(embedding_work(model, shape), False), (head_work(model, shape), True), (predicts, False)]
    for count, (ops, is_head) in zip(counts, [*parts, *ends], strict=True):
        yield float(count), ops, is_head
