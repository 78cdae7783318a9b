"""The operations of a step against the device's roofline: FLOPs per byte of memory traffic across, FLOPs per second up.

Seconds are the planner's own (`plan.time.blocks.compute_seconds`, one operation at a time), so that the rows of a rank add up
to the computing of its step. Bytes are the least that an operation reads and writes in the device's memory: a product its two
factors and its result, attention queries, keys, values and what they make (flash attention keeps scores on the chip),
element-wise work what it moves. FLOPs of attention are those of the pairs that a mask leaves. Forward and backward together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ultrascale.description.layout import NARROW
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.laws.curves import BACKWARD_WORK
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.blocks import compute_seconds, price_blocks, product_derate
from ultrascale.plan.time.passes import pass_seconds
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.time.stages import cut_stages
from ultrascale.plan.time.step_parts import KINDS, works
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Op, Shape

PASSES = 3
"""A product and its two gradients, each as large."""


class Work(NamedTuple):
    """One operation of a rank's step, all its blocks and micro-batches together."""

    name: str
    kind: str
    """One of `plan.time.step_parts.KINDS`."""
    count: float
    """Times in a step, forward."""
    seconds: float
    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


def step_work(one: Prediction) -> list[Work]:
    """Operations of the rank whose step it is, without what is computed again, the longest first."""
    workload, layout = one.workload, one.layout
    table = LayoutTable.of([layout])
    stages, blocks = cut_stages(workload, table, layout.layers_per_stage), price_blocks(workload, table)
    passes = pass_seconds(
        workload, table, blocks, CONSTANTS, layers=stages.layers, embedding=stages.has_embedding, head=stages.has_head,
        kept=stages.kept_layers,
    )  # fmt: skip
    row = int(np.where(stages.exists > 0, passes.total, 0.0)[:, 0].argmax())  # the slowest rank, whose step it is
    found: dict[tuple[str, str], Work] = {}
    for count, ops, is_head in works(workload, blocks, stages, row):
        for op in ops if count else ():
            for work in _works_of(workload, blocks.shapes[0], op, is_head):
                times = count * one.num_micro_batches
                before = found.get((work.name, work.kind), Work(work.name, work.kind, 0, 0, 0, 0))
                more = (work.count * times, work.seconds * times, work.flops * times, work.num_bytes * times)
                found[work.name, work.kind] = Work(work.name, work.kind, *map(sum, zip(before[2:], more, strict=True)))
    return sorted(found.values(), key=lambda work: -work.seconds)


def peak_flops(one: Prediction) -> float:
    """Per second, dense, of the dtype that products are made in."""
    precision = one.layout.precision
    dtype = "fp8" if precision in NARROW and "fp8" in one.workload.cluster.accelerator.peak_flops else precision
    return one.workload.cluster.accelerator.peak_flops_per_second(dtype)


def _works_of(workload: Workload, shape: Shape, op: Op, is_head: bool) -> Iterator[Work]:
    """Product, attention and element-wise part of an operation, those that take time."""
    for one in op.inside:
        for work in _works_of(workload, shape, one, is_head):
            yield Work(work.name, work.kind, *(op.pieces * value for value in work[2:]))
    for (kind, only), measure in zip(KINDS.items(), (_of_product, _of_attention, _of_moves), strict=True):
        stripped = replace(only(op), inside=())
        seconds = compute_seconds(workload, shape, [stripped], is_head).total(product_derate(workload, CONSTANTS))
        if seconds > 0:
            yield Work(op.name, kind, 1.0, seconds, *measure(op, shape, is_head))


def _of_product(op: Op, shape: Shape, is_head: bool) -> tuple[float, float]:
    assert op.product is not None
    m, n, k, copies = op.product
    item = 1 if shape.precision in NARROW and not is_head else shape.itemsize
    passes = copies * (op.forward_products + PASSES - 1)
    return 2.0 * m * n * k * passes, float(passes * (item * (m * k + k * n) + shape.itemsize * m * n))


def _of_attention(op: Op, shape: Shape, is_head: bool) -> tuple[float, float]:
    one = op.scores
    assert one is not None
    dims, pairs = one.head_dim + one.value_head_dim, one.queries * one.keys * one.share
    num_bytes = shape.itemsize * one.batch * dims * (one.queries * one.heads + one.keys * one.key_value_heads)
    return 2.0 * one.batch * one.heads * dims * pairs * (1 + BACKWARD_WORK), float(num_bytes * (1 + BACKWARD_WORK))


def _of_moves(op: Op, shape: Shape, is_head: bool) -> tuple[float, float]:
    return 0.0, float(op.moved_bytes + op.backward_moved_bytes)
