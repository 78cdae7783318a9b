"""Activations of a rank, for whole tables of layouts: what its blocks save, how many micro-batches are in flight, and its peaks.

    in flight     micro-batches between their forward and backward pass on a rank, by schedule (formulas below)
    saved         of one micro-batch on a rank: its blocks, the embedding, the head
    excess        what the block at work needs beyond what it saves, forward and backward

Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (zero bubble); DeepSeek-AI 2024 (DualPipe). `plan.pipeline_activations` counts them
action by action; tests hold these formulas to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.block_memory import (
    BlockMemory,
    Recompute,
    block_memory,
    dummy_gradient_bytes,
    embedding_memory,
    head_memory,
)
from ultrascale.plan.blocks import distinct_shapes, layer_kinds
from ultrascale.plan.layouts import RECOMPUTE, SCHEDULES, LayoutTable
from ultrascale.plan.stages import Stages
from ultrascale.plan.workload import Workload
from ultrascale.spec.work import Shape

Floats = NDArray[np.float64]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADED_BLOCKS_LEFT = 2
"""Blocks whose activations are on the device although they are offloaded: one on its way out, one at work."""


@dataclass(frozen=True)
class RankActivations:
    """Bytes, [3, layouts] or what broadcasts to it: the first, a middle and the last rank of the pipeline."""

    waiting: Floats
    """Of the micro-batches in flight but the one at work."""
    current: Floats
    """Of the micro-batch at work, all blocks of its stage and what is before them."""
    saved: Floats
    """Of the largest block."""
    forward_excess: Floats
    """Of the block at work, beyond what it saves."""
    backward_excess: Floats
    first_backward: Floats
    """The backward pass of the first block, the last to run: with what it saved."""
    head_forward: Floats
    """Of the head and loss, with what they save."""
    head_backward: Floats
    embedding_saved: Floats
    embedding_backward: Floats
    hidden: Floats
    """The residual stream, one tensor."""
    dummies: Floats
    """Gradients that nobody reads, kept for good; see `Stack.keeps_dummy_gradients`."""


def rank_activations(
    workload: Workload, table: LayoutTable, stages: Stages, micro_batches: NDArray[np.int64]
) -> RankActivations:
    """The activations of every layout of `table`."""
    shapes, shape_of = distinct_shapes(workload, table)
    saved, forward, backward = _blocks(workload, table, shapes, shape_of)
    head = _parts([head_memory(workload.model, shape, stack=workload.stack) for shape in shapes])[:, shape_of]
    embedding = _parts([embedding_memory(workload.model, shape, stack=workload.stack) for shape in shapes])[:, shape_of]
    hidden = np.array([s.outer_tokens * workload.model.hidden_size * s.itemsize for s in shapes], dtype=float)[shape_of]

    there = stages.layers > 0
    v = table.virtual_stages
    of_blocks = (stages.layers * saved).sum(axis=1)
    flight = in_flight(table, micro_batches)
    head_saved = head[0] * stages.has_head * np.where(table.schedule == SCHEDULES.index("afab"), micro_batches - 1, 0)
    before = embedding[0] * stages.has_embedding
    waiting = np.maximum(flight - 1 / v, 0) * of_blocks + (flight - 1) * before + head_saved
    largest = np.where(there, saved, 0).max(axis=1)
    current = of_blocks / v
    offloads = table.offload_activations > 0
    waiting = np.where(offloads, np.minimum(waiting, 0), waiting)
    current = np.where(offloads, np.minimum(current, OFFLOADED_BLOCKS_LEFT * largest), current)
    return RankActivations(
        waiting=waiting,
        current=current + before,
        saved=largest,
        forward_excess=np.where(there, forward - saved, 0).max(axis=1),
        backward_excess=np.where(there, backward - saved, 0).max(axis=1),
        first_backward=np.where(there, backward, 0).max(axis=1) + before,
        head_forward=head[1] * stages.has_head,
        head_backward=head[2] * stages.has_head,
        embedding_saved=before,
        embedding_backward=embedding[2] * stages.has_embedding,
        hidden=hidden * np.ones((3, 1)),
        dummies=_dummies(workload, shapes)[:, shape_of],
    )


def in_flight(table: LayoutTable, micro_batches: NDArray[np.int64]) -> Floats:
    """Micro-batches whose activations the first, a middle (the second) and the last rank hold at most: [3, layouts].

    Fractions are stages of `virtual_stages`: a rank may hold one stage of a micro-batch more than another.
    """
    pp, v, m = table.pp, table.virtual_stages, micro_batches
    rank = np.stack([np.zeros_like(pp), np.minimum(1, pp - 1), pp - 1])
    plain = np.minimum(m, pp - rank)
    looped = np.minimum(m * v, (v - 1) * pp + 2 * (pp - rank - 1) + 1) / v
    name = table.schedule
    flight = np.where(name == SCHEDULES.index("interleaved"), looped, plain).astype(float)
    flight = np.where(name == SCHEDULES.index("afab"), m, flight)
    # Zero-bubble schedules let weight gradients wait, so every rank holds as much as the first.
    flight = np.where(np.isin(name, [SCHEDULES.index("zb-h1"), SCHEDULES.index("zb-v")]), np.minimum(m, pp), flight)
    dual = np.isin(name, [SCHEDULES.index("dualpipe"), SCHEDULES.index("dualpipe-v")])
    flight = np.where(dual, np.minimum(m, pp + 1), flight)
    return np.where(pp == 1, 1.0, flight)


def _blocks(
    workload: Workload, table: LayoutTable, shapes: list[Shape], shape_of: NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Saved bytes and peaks of each kind of block: [kinds, layouts] each."""
    every = RECOMPUTE.index("every-k")
    share = np.where(table.recompute == every, 1.0 / table.recompute_every, 0.0)
    full = MODES.index("full")
    mode = np.where(table.recompute == every, MODES.index("none"), table.recompute)
    kinds = layer_kinds(workload)[0]
    used = set(np.unique(mode).tolist()) | ({full} if share.any() else set())
    by_mode = np.zeros((len(MODES), 3, len(kinds), len(shapes)))
    for number in sorted(used):
        for kind, layer in enumerate(kinds):
            by_mode[number, :, kind] = _parts([
                block_memory(workload.model, layer, shape, recompute=MODES[number], stack=workload.stack) for shape in shapes
            ])  # fmt: skip
    plain = np.moveaxis(by_mode[mode, :, :, shape_of], 0, -1)
    if not share.any():
        return plain[0], plain[1], plain[2]
    again = np.moveaxis(by_mode[full, :, :, shape_of], 0, -1)
    saved = plain[0] * (1 - share) + again[0] * share
    return saved, plain[1], np.where(share > 0, np.maximum(plain[2] - plain[0], again[2] - again[0]) + saved, plain[2])


def _dummies(workload: Workload, shapes: list[Shape]) -> Floats:
    """[1, shapes]."""
    kinds = layer_kinds(workload)[0]
    return np.array(
        [[dummy_gradient_bytes(workload.model, kinds, shape, stack=workload.stack) for shape in shapes]], dtype=float
    )


def _parts(memories: list[BlockMemory]) -> Floats:
    """[saved, forward peak, backward peak] x parts."""
    rows = [(one.saved_bytes, one.forward_peak_bytes, one.backward_peak_bytes) for one in memories]
    return np.array(rows, dtype=float).T
