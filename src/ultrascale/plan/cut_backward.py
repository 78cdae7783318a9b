"""What tp sends in each half of a backward pass that is cut in two (`parallel.pipeline_weights`), and how often passes are cut.

                     in one (B)                 cut: I                    cut: W
    column product   x gathered beside dx       sum of dx                 x gathered
                     sum of dx beside dW
    row product      dz gathered                dz gathered               dz gathered once more

Without sequence parallelism nothing is gathered, and I sends all there is to send. In I nothing is beside the sum of dx: dW,
which is beside it in B, is W's. In W nothing is beside a gather: products are made one after the other, each of what was
gathered.

Gradients of weights of the head, of routers and of experts do not wait: they are I's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.layouts import SCHEDULES, LayoutTable
from ultrascale.schedules.actions import Action, Kind
from ultrascale.spec.layout import NARROW
from ultrascale.spec.op_builders import is_fp8, narrow_bytes
from ultrascale.spec.ops import Collective, Op, Shape

Half = Literal["input", "weight"]
HALVES: tuple[Half, Half] = ("input", "weight")
CUTTING = ("zb-h1", "zb-v", "dualpipe", "dualpipe-v")
"""Schedules that cut backward passes in two, the first two all."""

NEVER_WAIT = ("mlp.experts.", "mlp.router")
"""Products that are no linear layers: their weights' gradients are made in I."""


def may_wait(op: Op) -> bool:
    """Whether W makes the gradient of its weight."""
    return op.kind == "matmul" and not op.name.startswith(NEVER_WAIT)


def sent_in_half(op: Op, half: Half, shape: Shape) -> Op:
    """`op` with only those collectives of its backward pass that are sent in `half` of one that is cut in two."""
    moves = shape.kernels.gathers_again and shape.cuts_sequence
    in_both = moves and is_row_sum(op)
    in_w = moves and op.kind == "gather" and op.name.endswith(".gather")

    def is_sent(one: Collective) -> bool:
        if one.when != "backward":
            return False
        gathers = one.axis == "tp" and one.kind == "all_gather"
        return (in_both or in_w) and gathers if half == "weight" else not (in_w and gathers)

    sent = tuple(one for one in op.collectives if is_sent(one))
    if in_both and half == "weight" and shape.precision in NARROW:  # it waits as it was rounded for the products
        sent = tuple(one._replace(num_bytes=narrow_bytes(shape, one.num_bytes // shape.itemsize)) for one in sent)
    return replace(op, collectives=sent)


def is_row_sum(op: Op) -> bool:
    """Whether it sums the parts of a row product, whose gradient then is gathered from this rank's positions."""
    return op.name.endswith(".scatter") and any(one.axis == "tp" for one in op.collectives)


def reads_gathered(op: Op) -> bool:
    """Whether it is a column product that reads a sequence gathered over tp."""
    return op.kind == "matmul" and op.reads[0].endswith("_whole")


def gathered_input_bytes(op: Op, shape: Shape) -> int:
    """Of a column product's input, which W gathers once for all products of it; 0 of others."""
    if op.product is None or not (shape.kernels.gathers_again and shape.cuts_sequence and reads_gathered(op)):
        return 0
    elements = op.product.m * op.product.k
    return narrow_bytes(shape, elements) if is_fp8(op) else elements * shape.itemsize


def cut_share(table: LayoutTable, num_micro_batches: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of the backward passes of the first, a middle and the last rank those that a known schedule cuts, [3, layouts]. The first
    stage's never are."""
    name, m, p = np.array(SCHEDULES)[table.schedule], num_micro_batches, table.pp
    shares = np.zeros((3, len(table)))
    shares[:, name == "zb-h1"], shares[:, name == "zb-v"] = [[0.0], [1.0], [1.0]], [[0.5], [1.0], [1.0]]
    # `schedules.dualpipe_v.two_streams`: as many, however many micro-batches there are.
    of_v, of_two = (p - 1) / (2 * m), np.maximum(p // 2 - 1, 0) / m
    shares += np.where(name == "dualpipe-v", of_v, np.where(name == "dualpipe", of_two, 0.0))
    return np.where(p > 1, np.minimum(shares, 1.0), 0.0)


def cut_share_of(schedule: Sequence[Sequence[Action]]) -> float:
    """Of all backward passes of a schedule those that are told as I and W."""
    kinds = [part.kind for row in schedule for action in row for part in action.parts]
    cut = kinds.count(Kind.INPUT_GRADIENT)
    return cut / max(1, cut + kinds.count(Kind.BACKWARD))
