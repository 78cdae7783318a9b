"""Tensor-parallel communication in each half of a backward pass that is split into I (input gradients) and W (weight gradients,
`parallel.pipeline.pipeline_weights`); and the fraction of passes that are split.

                     unsplit (B)                         split: I                  split: W
    column-parallel  all-gather x, overlaps with dx      reduce-scatter dx         all-gather x
                     reduce-scatter dx, overlaps with dW
    row-parallel     all-gather dz                       all-gather dz             all-gather dz again

Without sequence parallelism nothing is gathered, and I has all the traffic. In I nothing overlaps with the reduction of dx: dW,
which overlaps with it in B, is deferred to W. In W nothing overlaps with an all-gather: weight gradients are computed one after
the other, each from the gathered tensor.

Weight gradients of the head, of routers and of experts are not deferred: I computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ultrascale.description.layout import NARROW
from ultrascale.plan.layouts import Column, Floats, LayoutTable, by_schedule
from ultrascale.schedules.actions import Action, Kind
from ultrascale.work.op_builders import narrow_bytes
from ultrascale.work.ops import Collective, Op, Shape

Half = Literal["input", "weight"]
HALVES: tuple[Half, Half] = ("input", "weight")
_SPLITS_ALL, _SPLITS_ENDS = (by_schedule(lambda schedule, how=how: schedule.splits_backward == how) for how in ("all", "ends"))
_STAGES, _COPIES = by_schedule(lambda schedule: schedule.virtual_stages or 0), by_schedule(lambda schedule: schedule.copies)

NOT_DEFERRED = ("mlp.experts.", "mlp.router", "lm_head", "embed_tokens")
"""Weights whose gradients are computed in I, because their operations are not plain linear layers."""


def is_deferrable(op: Op) -> bool:
    """True if the weight gradient of `op` is deferred to W: a linear layer that is not the head, a router or an expert."""
    return op.kind == "matmul" and not op.name.startswith(NOT_DEFERRED)


def sent_in_half(op: Op, half: Half, shape: Shape) -> tuple[Collective, ...]:
    """Collectives of the backward pass of `op` that run in `half` (I or W) of a split backward pass."""
    moves = shape.kernels.gathers_again and shape.shards_sequence
    in_both = moves and is_row_sum(op)
    in_w = moves and op.kind == "gather" and op.name.endswith(".gather")

    if half == "weight" and not (in_both or in_w):
        return ()
    backward = tuple(collective for collective in op.collectives if collective.when == "backward")
    if half == "input" and not in_w:
        return backward
    gathered = half == "weight"
    sent = tuple(item for item in backward if (item.axis == "tp" and item.kind == "all_gather") == gathered)
    if in_both and half == "weight" and shape.precision in NARROW:  # kept as rounded for the GEMMs
        sent = tuple(
            collective._replace(num_bytes=narrow_bytes(shape, collective.num_bytes // shape.itemsize)) for collective in sent
        )
    return sent


def is_row_sum(op: Op) -> bool:
    """True if the operation reduces a row-parallel layer's partial sums: its gradient is all-gathered over all positions."""
    return op.name.endswith(".scatter") and any(collective.axis == "tp" for collective in op.collectives)


def reads_gathered(op: Op) -> bool:
    """True for a column-parallel layer that reads a sequence all-gathered over tp."""
    return op.kind == "matmul" and op.reads[0].endswith("_whole")


def gathered_input_bytes(op: Op, shape: Shape) -> int:
    """Bytes of a column-parallel layer's input, which W all-gathers once for all its readers; 0 for other operations."""
    if op.product is None or not (shape.kernels.gathers_again and shape.shards_sequence and reads_gathered(op)):
        return 0
    elements = op.product.m * op.product.k
    return narrow_bytes(shape, elements) if op.in_fp8 else elements * shape.itemsize


def split_shares(table: LayoutTable, num_micro_batches: Column) -> Floats:
    """Fraction of backward passes that a known schedule splits into I and W, on the first, a middle and the last rank, [3,
    layouts]. Those of the first stage are never split."""
    m, p, stages = num_micro_batches, table.pp, _STAGES[table.schedule]
    shares = np.zeros((3, len(table))) + _SPLITS_ALL[table.schedule]
    shares[0] -= _SPLITS_ALL[table.schedule] / np.maximum(np.where(stages, stages, table.virtual_stages), 1)
    # `schedules.kinds.dualpipe_v.two_streams`: a fixed number, independent of the number of micro-batches.
    depth = p // _COPIES[table.schedule]
    shares += np.where(_SPLITS_ENDS[table.schedule], np.maximum(depth - 1, 0) / (np.maximum(stages, 1) * m), 0.0)
    return np.where(p > 1, np.minimum(shares, 1.0), 0.0)


def split_share_of(schedule: Sequence[Sequence[Action]]) -> float:
    """Fraction of a schedule's backward passes that are split into I and W."""
    kinds = [part.kind for row in schedule for action in row for part in action.parts]
    num_split = kinds.count(Kind.INPUT_GRADIENT)
    return num_split / max(1, num_split + kinds.count(Kind.BACKWARD))
