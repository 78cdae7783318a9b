"""1F1B played a micro-batch at a time for all ranks at once, and many micro-batches in one product: exact for unequal stages.

Rank r of p keeps p - r micro-batches: after as many forward passes it takes B_k and F_(k+p-r) in turn. Let level u be F_(u-r)
and B_(u-p+1) of every rank r. With y and x the ends of the two and c the seconds of a message across a border,

    x[r]  = max(y[r], x[r+1] + c) + B[r]        the same level, from the last rank to the first: a running maximum
    y'[r] = max(x[r], y[r-1] + c) + F[r]        the next level

from level p-1, before which there are only forward passes, to m-1, after which they run out rank by rank. What is between is
linear in the algebra of maximum and sum: once a level is the one before it L later on all ranks, so are all that follow, and
until then n levels are the n-th power of one, by squaring: log n products of matrices. Baccelli et al., Synchronization and
Linearity, 1992.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL_ELEMENTS = 5000
"""A level by itself takes about as long as this many elements of a product of matrices: a dozen calls of NumPy."""
MOST_LEVELS = 48
"""Played one by one in search of a rhythm, before they are multiplied: about what one product of 32 ranks costs."""
SAME = 1e-13
"""Tolerance relative to the time so far: levels whose lengths differ by less on all ranks are in rhythm."""


class _Costs(NamedTuple):
    """Seconds, each [ranks, cases, 1]."""

    forward: Floats
    border: Floats
    """Seconds of the message from the rank before; minus infinity for the first."""
    rising: Floats
    """Added to y so that its maximum over the ranks from r on is x[r], but for what depends on r."""
    falling: Floats
    """Added to that maximum to give x[r]: the part that depends on r."""


def level_step_seconds(forward: Floats, backward: Floats, send: Floats, num_micro_batches: int) -> Floats:
    """Seconds of a step, [cases], of 1F1B with one stage a rank and at least as many micro-batches as ranks.

    `forward`, `backward`: of a micro-batch on each rank, [ranks, cases]; `send`: of a message, [ranks - 1, cases].
    """
    ranks, cases = forward.shape
    assert ranks <= num_micro_batches, "with fewer micro-batches than ranks there is no level that all of them share"
    nothing = np.zeros((1, cases))
    way, back = np.concatenate([nothing, send.cumsum(axis=0)]), backward[::-1].cumsum(axis=0)[::-1]
    border = np.concatenate([nothing - np.inf, send])
    columns = (forward, border, way - np.concatenate([back[1:], nothing]), back - way)
    costs = _Costs(*(column[:, :, None] for column in columns))
    left = np.arange(ranks - 1, -1, -1)[:, None]
    first = forward.cumsum(axis=0) + way + left * np.maximum.accumulate(forward, axis=0)
    y = _levels(first[:, :, None], costs, num_micro_batches - ranks)
    x = _backward(y, costs)
    return _drain(x, y, costs)


def _drain(x: Floats, y: Floats, costs: _Costs) -> Floats:
    """The end of the last pass, [cases], from the last level that all ranks share; a rank less has a forward pass each time."""
    (x, y), columns = (column[:, :, 0].copy() for column in (x, y)), [column[:, :, 0] for column in costs]
    forward, border, rising, falling = columns
    arrives = np.empty_like(y)
    for without in range(1, len(x)):
        np.add(y[without - 1 : -1], border[without:], out=arrives[without:])
        np.maximum(x[without:], arrives[without:], out=arrives[without:])
        np.add(arrives[without:], forward[without:], out=y[without:])
        y[:without] = x[:without]
        np.add(y, rising, out=x)
        np.maximum.accumulate(x[::-1], axis=0, out=x[::-1])
        x += falling
    return x[0]


def _backward(y: Floats, costs: _Costs) -> Floats:
    """x of a level from its y; both [ranks, cases, columns]."""
    return np.maximum.accumulate((y + costs.rising)[::-1], axis=0)[::-1] + costs.falling


def _forward(x: Floats, y: Floats, costs: _Costs) -> Floats:
    """y of the next level."""
    arrives = np.concatenate([y[:1], y[:-1]]) + costs.border
    return np.maximum(x, arrives) + costs.forward


def _levels(y: Floats, costs: _Costs, count: int) -> Floats:
    """y, [ranks, cases, 1], after so many levels."""
    ranks, cases = y.shape[:2]
    for _ in range(min(count, MOST_LEVELS)):
        after = _forward(_backward(y, costs), y, costs)
        longer, y, count = after - y, after, count - 1
        if np.all(np.ptp(longer, axis=0) <= SAME * y[-1]):
            return y + count * longer
    if count * LEVEL_ELEMENTS < count.bit_length() * ranks**3 * cases:
        for _ in range(count):
            y = _forward(_backward(y, costs), y, costs)
        return y
    unit = np.where(np.eye(ranks, dtype=bool), 0.0, -np.inf)[:, None, :] + np.zeros((1, cases, 1))
    power = _forward(_backward(unit, costs), unit, costs)  # [rank, cases, rank it came from]
    while count:
        if count % 2:
            y = (power + y[:, :, 0].T).max(axis=2)[:, :, None]
        count //= 2
        if count:
            power = (power[:, :, :, None] + power.transpose(1, 0, 2)).max(axis=2)
    return y
