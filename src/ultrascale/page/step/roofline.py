"""The operations of a step on the device's roofline: x is FLOPs per byte of memory traffic, y is FLOP/s.

Seconds are the planner's own (`plan.time.blocks.compute_seconds`, one operation at a time), so that the rows of a rank add up
to the compute time of its step. Bytes are the minimum that an operation reads and writes in device memory: a GEMM its operands
and result, attention queries, keys, values and output (flash attention keeps scores on the chip), an element-wise operation its
tensors. FLOPs of attention count only unmasked pairs. Forward and backward together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ultrascale.description.layout import NARROW
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.laws.curves import BACKWARD_WORK
from ultrascale.plan.time.blocks import compute_seconds, product_derate
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.time.step_parts import KINDS, slowest_rank, works
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Op, Shape

PASSES = 3
"""A GEMM and its two gradients, with equal FLOPs."""


class OperationCost(NamedTuple):
    """One operation of a rank's step, all its blocks and micro-batches together."""

    name: str
    kind: str
    """One of `plan.time.step_parts.KINDS`."""
    count: float
    """Number of forward executions in a step."""
    seconds: float
    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


def operation_costs(prediction: Prediction) -> list[OperationCost]:
    """Operations of the slowest rank, whose step is shown, without recomputation, the longest first."""
    workload = prediction.workload
    blocks, stages, _, row = slowest_rank(prediction)
    totals: dict[tuple[str, str], OperationCost] = {}
    for count, ops, is_head in works(workload, blocks, stages, row):
        for op in ops if count else ():
            for work in _works_of(workload, blocks.shapes[0], op, is_head):
                times = count * prediction.num_micro_batches
                before = totals.get((work.name, work.kind), OperationCost(work.name, work.kind, 0, 0, 0, 0))
                more = (work.count * times, work.seconds * times, work.flops * times, work.num_bytes * times)
                totals[work.name, work.kind] = OperationCost(
                    work.name, work.kind, *map(sum, zip(before[2:], more, strict=True))
                )
    return sorted(totals.values(), key=lambda work: -work.seconds)


def peak_flops(prediction: Prediction) -> float:
    """Peak dense FLOP/s in the dtype of GEMMs."""
    precision = prediction.layout.precision
    dtype = "fp8" if precision in NARROW and "fp8" in prediction.workload.accelerator.peak_flops else precision
    return prediction.workload.accelerator.peak_flops_per_second(dtype)


def _works_of(workload: Workload, shape: Shape, op: Op, is_head: bool) -> Iterator[OperationCost]:
    """GEMM, attention and element-wise part of an operation, those that take time."""
    for inner in op.inside:
        for work in _works_of(workload, shape, inner, is_head):
            yield OperationCost(work.name, work.kind, *(op.pieces * value for value in work[2:]))
    for (kind, keep_kind), measure in zip(KINDS.items(), (_of_product, _of_attention, _of_elementwise), strict=True):
        stripped = replace(keep_kind(op), inside=())
        seconds = compute_seconds(workload, shape, [stripped], is_head).total(product_derate(workload, CONSTANTS))
        if seconds > 0:
            yield OperationCost(op.name, kind, 1.0, seconds, *measure(op, shape, is_head))


def _of_product(op: Op, shape: Shape, is_head: bool) -> tuple[float, float]:
    assert op.product is not None
    m, n, k, copies = op.product
    item = 1 if shape.precision in NARROW and not is_head else shape.itemsize
    passes = copies * (op.forward_products + PASSES - 1)
    return 2.0 * m * n * k * passes, float(passes * (item * (m * k + k * n) + shape.itemsize * m * n))


def _of_attention(op: Op, shape: Shape, is_head: bool) -> tuple[float, float]:
    scores = op.scores
    assert scores is not None
    dims, pairs = scores.head_dim + scores.value_head_dim, scores.queries * scores.keys * scores.share
    num_bytes = shape.itemsize * scores.batch * dims * (scores.queries * scores.heads + scores.keys * scores.key_value_heads)
    return 2.0 * scores.batch * scores.heads * dims * pairs * (1 + BACKWARD_WORK), float(num_bytes * (1 + BACKWARD_WORK))


def _of_elementwise(op: Op, shape: Shape, is_head: bool) -> tuple[float, float]:
    return 0.0, float(op.moved_bytes + op.backward_moved_bytes)
