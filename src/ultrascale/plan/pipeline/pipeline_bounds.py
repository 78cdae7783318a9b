"""Closed forms of pipeline bubbles over whole columns, for the search; `plan.pipeline.play` simulates the best layouts.

p ranks, m micro-batches, v stages a rank; F, I, W seconds of one micro-batch in one stage, B = I + W; s seconds of a message; q
= p-1. With equal stages and short messages, a step is the work of one rank plus:

    afab            q(F+B) + 2qs                              1f1b           q(F+B) + 2s(q + floor(q(m-1)/p))
    interleaved     (q + (v-1)max(p-m, 0))(F+B) + messages    breadth-first  the same
    zb-h1           max(qF, qI, q(F+I-W)) + messages          Qi et al. and DeepSeek write the last one only
    zb-v            the longest of eight paths: qF where F = I = W, because its ranks start one after the other
    dualpipe(-v)    the longest of four, with q = p/2 - 1 (or p - 1); q(F&B + B - 3W), as DeepSeek writes, is a little more

They were derived from the simulator (for random F, I, W, s the slopes of its step are integers), and tests compare them. Exact
for any m (but see `ENOUGH`) without messages, and for afab and 1f1b with them. Every form is one path through the schedule, so
the longest is a lower bound where messages are long: over F, I or W/2. A form belongs to one builder's order; schedules of
builders without a form are simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.pipeline.pipeline_steady import long_step_seconds
from ultrascale.plan.pipeline.play import StageSeconds
from ultrascale.schedules.build import builder_of
from ultrascale.schedules.kinds.afab import afab
from ultrascale.schedules.kinds.breadth_first import breadth_first
from ultrascale.schedules.kinds.dualpipe import dualpipe
from ultrascale.schedules.kinds.dualpipe_v import dualpipe_v
from ultrascale.schedules.kinds.interleaved import interleaved
from ultrascale.schedules.kinds.one_f_one_b import one_f_one_b
from ultrascale.schedules.kinds.zb_h1 import zb_h1
from ultrascale.schedules.kinds.zb_v import zb_v

Floats = NDArray[Any]
Builder = Callable[..., Any]
Fill = Callable[..., Floats]

ENOUGH: dict[Builder, Callable[..., NDArray[np.bool_]]] = {
    zb_v: lambda p, m: m >= 2 * p - 1,
    dualpipe: lambda p, m: (m >= 2 * p) & (m % 2 == 0),
    dualpipe_v: lambda p, m: m >= 2 * p,
}
"""Conditions on ranks and micro-batches for exact forms, for builders whose forms are not always exact; else a lower bound."""


def bubble_seconds(
    schedule: str, pp: ArrayLike, virtual_stages: ArrayLike, num_micro_batches: ArrayLike, forward: ArrayLike,
    input_gradient: ArrayLike, weight_gradient: ArrayLike, *, send: ArrayLike = 0.0,
) -> Floats:  # fmt: skip
    """Seconds of a step in which a rank is idle, if all stages cost the same.

    `forward`, `input_gradient`, `weight_gradient`: seconds of a micro-batch on one stage. Columns broadcast; `schedule`: a key
    of `SCHEDULES`. Exact where the module docstring says so; otherwise a lower bound.
    """
    columns = (pp, virtual_stages, num_micro_batches, forward, input_gradient, weight_gradient, send)
    form = _FORMS.get(builder_of(schedule)) or partial(_played, schedule)
    return np.maximum(form(*map(np.asarray, columns)), 0.0)


def _played(schedule, p, v, m, f, i, w, s):
    """Bubble by simulation, once for each number of ranks, stages and micro-batches, with all its cases as columns."""
    known = SCHEDULES[schedule]
    sizes = np.broadcast_arrays(p, v, m, f, i, w, s)
    p, v, m, *seconds = (column.ravel() for column in sizes)
    bubbles = np.zeros(p.shape)
    for key in set(zip(p.tolist(), v.tolist(), m.tolist(), strict=True)):
        rows = np.flatnonzero((p == key[0]) & (v == key[1]) & (m == key[2]))
        stages = key[0] * known.stages_a_rank(key[1])
        forward, inputs, weights, send = (np.broadcast_to(case_seconds[rows], (stages, len(rows))) for case_seconds in seconds)
        step = long_step_seconds(
            schedule, key[0], key[2], StageSeconds(forward, inputs, weights, send[1:]), virtual_stages=key[1]
        )
        bubbles[rows] = step - key[2] * known.stages_a_rank(key[1]) * (forward + inputs + weights)[0]
    return bubbles.reshape(sizes[0].shape)


def _afab(p, v, m, f, i, w, s):
    return (p - 1) * (f + i + w + 2 * s)


def _one_f_one_b(p, v, m, f, i, w, s):
    return (p - 1) * (f + i + w) + 2 * s * (p - 1 + (p - 1) * (m - 1) // p)


def _interleaved(p, v, m, f, i, w, s):
    # Rounds of exactly p micro-batches leave no time for messages between a rank's stages; after two, both directions are late.
    count = np.maximum(1, m // p)
    tight = np.where(m // count > p, 0, np.where((m % count > 0) & (m > p), 1, 2))
    return (p - 1 + (v - 1) * np.maximum(p - m, 0)) * (f + i + w) + s * (2 * (p - 1) + tight * p * (v - 1)) * (p > 1)


def _breadth_first(p, v, m, f, i, w, s):
    borders = np.where(m > p, p - 1, p * v - 1) * (p > 1)
    return (p - 1 + (v - 1) * np.maximum(p - m, 0)) * (f + i + w) + 2 * s * borders


def _zb_h1(p, v, m, f, i, w, s):
    q, short, full = p - 1, np.maximum(p - m, 0), m > p
    paths = [
        q * i + short * f + 2 * q * s,
        q * f + short * i + (2 * q + np.where(full, q, m - 3)) * s,
        q * (f + i) - np.minimum(q, m - 1) * w + (2 * q + 2 * np.where(full, q, m - 2)) * s,
    ]
    return reduce(np.maximum, paths)


def _zb_v(p, v, m, f, i, w, s):
    q = p - 1
    paths = [
        2 * q * (i - w) + (6 * q - 2) * s, 2 * q * f - q * i - w + 3 * q * s,
        i + (q - 1) * w + 3 * q * s, (2 * q - 1) * f + (1 - q) * i + (3 * q - 2) * s,
        q * i + (5 * q - 2) * s, f + (q - 1) * w + (3 * q - 2) * s,
        2 * q * f - (2 * q + 1) * w + 4 * q * s, (2 * q - 1) * f + i - 2 * q * w + (4 * q - 2) * s,
    ]  # fmt: skip
    enough = ENOUGH[zb_v](p, m)
    return np.where(q == 0, 0.0, np.where(enough, reduce(np.maximum, paths), _there_and_back(2 * p, m, 2, f, i, w)))


def _dualpipe_v(p, v, m, f, i, w, s):
    crossed = p - 1 + 2 * ((p - 1) * (m - 1) // p)
    meeting = _meeting(p - 1, crossed, f, i, w, s, more=2 * (p - 1), split=p - 1)
    return np.where(ENOUGH[dualpipe_v](p, m), meeting, _there_and_back(2 * p, m, 2, f, i, w))


def _dualpipe(p, v, m, f, i, w, s):
    q = p // 2 - 1
    meeting = _meeting(q, m * (p - 1) // p + 2 * q, f, i, w, s, more=q, split=q)
    return np.where(ENOUGH[dualpipe](p, m), meeting, _there_and_back(p, m, 1, f, i, w))


def _meeting(q, crossed, f, i, w, s, *, more, split):
    """Longest of the four paths if two streams meet; with `crossed` messages, and `more` on the last two paths."""
    paths = [
        2 * q * f + crossed * s,
        2 * q * f + q * (i - w) + (crossed + split) * s,
        (q - 1) * f + q * i + (crossed + more) * s,
        (q - 1) * f + 2 * q * i - q * w + (crossed + more + split) * s,
    ]
    return reduce(np.maximum, paths)


def _there_and_back(num_stages, m, stages_a_rank, f, i, w):
    """Lower bound: one micro-batch through all stages and back, minus the work of a rank."""
    return num_stages * (f + i) + w - m * stages_a_rank * (f + i + w)


_FORMS: dict[Builder, Fill] = {
    afab: _afab, one_f_one_b: _one_f_one_b, interleaved: _interleaved, breadth_first: _breadth_first,
    zb_h1: _zb_h1, zb_v: _zb_v, dualpipe: _dualpipe, dualpipe_v: _dualpipe_v,
}  # fmt: skip
