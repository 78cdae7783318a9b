"""The planner's prediction for a rank, in the terms of a trace: peak memory, messages and FLOPs of a step.

Comes from the memory replay, which also counts messages and FLOPs (`plan.memory.tally`), plus messages sent once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from ultrascale.catalogue.stacks.stack import SCALED_TOGETHER, UPDATED_TOGETHER
from ultrascale.description.architecture.weights import Weight
from ultrascale.description.layout import DTYPE_BYTES, Layout
from ultrascale.description.run import Run, run_of_island
from ultrascale.plan.islands import host_bytes, sent_by_rank
from ultrascale.plan.memory.ledger import MemorySnapshot
from ultrascale.plan.memory.replay import (
    MemoryPlan,
    exchanged_bytes,
    held_weights,
    muon_matrices,
    num_micro_batches,
    stage_parts,
)
from ultrascale.plan.memory.sharding import scale_messages, scale_tables
from ultrascale.plan.memory.stage_work import StagePart
from ultrascale.plan.memory.tally import Traffic, TrafficKey, per_step
from ultrascale.plan.report import plan_rank
from ultrascale.work.fp8_slots import SLOT_BYTES, num_slots
from ultrascale.work.sharding.owners import exchanges, members, orthogonalising_flops, owned_shapes, part_shape, slice_spans
from ultrascale.work.sharding.places import Coordinates, shard_of

if TYPE_CHECKING:  # imports torch, which a plan does without
    from ultrascale.kernels.choice.device_kind import Kind

NORM_BYTES = 8
"""Bytes of the gradient norm's sum of squares, in fp64."""
SCALE_BYTES, MOMENTS = 4, 2
"""Bytes of a scale of moments in 8 bits, fp32; and the number of moments per weight."""


@dataclass(frozen=True)
class Planned:
    """Predicted step of a rank."""

    peak: MemorySnapshot
    highest: dict[str, int]
    """The most of each category of memory, whenever that is."""
    before_update: MemorySnapshot
    """Moment at which all gradients are complete."""
    traffic: dict[TrafficKey, Traffic]
    flops: int
    """FLOPs of GEMMs, recomputed ones included, without attention."""
    attention_flops: int
    """FLOPs of attention, over the full square of scores."""
    outer: tuple[int, int] | None = None
    """Bytes that islands send to others in one round, and keep in host memory."""


def planned_rank(run: Run, rank: int, device: Kind) -> Planned:
    """Prediction for the second of two steps."""
    layout = run.layout
    if run.islands.count > 1:
        outer = sum(sent_by_rank(run, rank).values()), host_bytes(run, rank)
        return replace(planned_rank(run_of_island(run), rank, device), outer=outer)
    count = num_micro_batches(layout, run.batch.sequences_per_batch)
    plan = _plan(run, rank, device, count)
    tally = plan.tally
    if plan.num_replayed < count:
        copies = layout.known_schedule.copies if layout.known_schedule else 1  # micro-batches enter at both ends of DualPipe
        fewer = _plan(run, rank, device, plan.num_replayed - copies)
        assert fewer.num_replayed == plan.num_replayed - copies, fewer.num_replayed
        tally = per_step(tally, fewer.tally, (count - plan.num_replayed) // copies)
    for key, num_bytes in _once_a_step(run, rank):
        tally.send(*key, num_bytes)
    matrices = _matrices(run, rank)
    for key, num_bytes in _scales(run, rank, device):
        tally.send(*key, num_bytes)
    for exchange in exchanges(matrices, layout, rank):
        key = TrafficKey("all_to_all", *layout.group(exchange.axis))
        for elements in exchange.sent_elements:  # nothing too, from who owns none
            tally.counts[key] += 1
            tally.sizes[key] += elements * _iterated_itemsize(layout)
    products = tally.products + sum(orthogonalising_flops(shape) for shape in owned_shapes(matrices, layout, rank))
    return Planned(plan.peak_by_step[1], plan.highest_by_step[1], plan.before_update, tally.traffic, products, tally.attention)


def _matrices(run: Run, rank: int) -> list[Weight]:
    """Matrices that Muon updates, of the rank's stages."""
    return muon_matrices(run.model, _parts(run, rank)) if run.optimizer.name == "muon" else []


def _parts(run: Run, rank: int) -> dict[int, StagePart]:
    """A rank's stages."""
    return stage_parts(run.model, run.layout, run.batch.sequence_length, Coordinates.of(run.layout, rank))


def _iterated_itemsize(layout: Layout) -> int:
    """Bytes of an element of a matrix in the dtype in which Muon sends and orthogonalises it."""
    return DTYPE_BYTES["fp64" if layout.master_dtype == "fp64" else "bf16"]


def _plan(run: Run, rank: int, device: Kind, count: int) -> MemoryPlan:
    """Memory plan of two steps of so many micro-batches."""
    layout = run.layout
    return plan_rank(run, rank, device, steps=2, sequences_per_batch=count * layout.dp * layout.micro_batch_size)


def _scales(run: Run, rank: int, device: Kind) -> Iterator[tuple[tuple[str, tuple[int, int]], int]]:
    """Messages between tp ranks for the scales of 8-bit moments, if a block of a row is split over them
    (`train.optimizers.compact_adamw`)."""
    layout = run.layout
    for weight in _weights(run, rank) if run.optimizer.name == "adamw-8bit" else ():
        axis, whole = "expert_tp" if weight.is_expert else "tp", weight.shape[-1]
        if len(weight.shape) == 1 or weight.tp_dim != len(weight.shape) - 1 or layout.group(axis)[0] == 1:
            continue
        spans = slice_spans(weight, layout, members(layout, axis, rank))
        if any(span.first % SCALED_TOGETHER for span in spans):
            rows, together = prod(part_shape(weight, layout, rank)[:-1]), max(1, UPDATED_TOGETHER[device] // whole)
            for first in range(0, rows, together):
                num_bytes = min(together, rows - first) * -(-whole // SCALED_TOGETHER) * SCALE_BYTES
                yield from [(("all_reduce", layout.group(axis)), num_bytes)] * MOMENTS


def _weights(run: Run, rank: int) -> list[Weight]:
    """The weights of a rank's stages."""
    return held_weights(run.model, _parts(run, rank))


def _once_a_step(run: Run, rank: int) -> Iterator[tuple[tuple[str, tuple[int, int]], int]]:
    """Messages that `parallel.share` sends once per step, at its end: partial gradients of replicated weights over tp, the tied
    embedding's, mirror ranks', the gradient norm, amaxes of delayed fp8 scaling; and before the next step the scales of weights
    gathered in fp8."""
    model, layout = run.model, run.layout
    itemsize, coordinates = DTYPE_BYTES[layout.master_dtype], Coordinates.of(layout, rank)
    shares: Counter[int] = Counter()
    for weight in _weights(run, rank):
        shard = shard_of(weight, layout, coordinates)
        if shard.is_partial:
            shares[shard.num_tp_copies] += prod(part_shape(weight, layout, rank))
    for num_tp_copies, elements in shares.items():
        yield ("all_reduce", (num_tp_copies, 1)), elements * itemsize
    yield ("all_reduce", (layout.world_size, 1)), NORM_BYTES
    yield ("all_reduce", (layout.world_size, 1)), num_slots(model, layout) * SLOT_BYTES
    whole = [replace(weight, shape=shard_of(weight, layout, coordinates).shape) for weight in _weights(run, rank)]
    for group, num_bytes in scale_messages(scale_tables(model, layout, whole), layout):
        yield ("all_reduce", group), num_bytes
    parts = stage_parts(model, layout, run.batch.sequence_length, coordinates)
    for shared in exchanged_bytes(model, layout, rank, parts):
        yield ("send", (layout.pp, layout.group("pp")[1])), shared
