"""Memory of every layout of a table, per pipeline rank and category, and whether it fits.

    state        weights, gradients, optimizer: `plan.columns.rank_state`
    activations  blocks replayed once per distinct shape: `plan.columns.block_memory`, combined by
                 `plan.columns.rank_activations`
    moments      the moments of a step at which memory can peak: `plan.columns.rank_moments`
    allocator    memory reserved beyond that, and memory outside torch: here

Whole columns in NumPy; a single layout takes about a millisecond. They filter a search; printed memory comes from the replay
(`plan.memory.replay`), against which tests check these columns.

Memory beyond the bytes of live tensors:

reserved    segments that torch's caching allocator took from CUDA. Blocks above 1 MiB are cut out of 20 MiB segments, those
            above 10 MiB are rounded to 2 MiB (c10/core/AllocatorConfig.h), and freed segments are kept for the next block
            that fits: a step whose tensors have few sizes wastes little. Each stream has its own segments
            (`plan.columns.rank_moments.aside_bytes`), and without expandable segments no two are ever joined: FSDP's
            largest buffers do not fit into segments that activations have freed (`plan.columns.rank_moments.late_bytes`).
            `trace.allocator` replays the allocator; `tests/agree/test_reserved_agrees.py` compares
outside     CUDA's context and modules, NCCL's buffers of each communicator, cuBLAS's and attention's workspaces
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from ultrascale.description.layout import Layout
from ultrascale.plan.columns.fp8_state import fp8_bytes
from ultrascale.plan.columns.rank_activations import rank_activations
from ultrascale.plan.columns.rank_moments import MOMENTS, aside_bytes, late_bytes, rank_moments
from ultrascale.plan.columns.rank_state import rank_state
from ultrascale.plan.layouts import Bools, Column, Floats, LayoutTable
from ultrascale.plan.time.stages import Stages, partition_stages
from ultrascale.plan.workload import Workload
from ultrascale.schedules.executable import Schedule

CATEGORIES = ("weights", "gathered", "gradients", "optimizer", "activations", "buffers")
INDEX_BYTES = 8
"""Bytes of a token or a target: int64."""
MARGIN = 0.10
"""Headroom as a fraction of the device's memory, beyond the needed bytes. docs/memory-model.md says how many published runs
this classifies correctly."""
RETAINED_SHARE = 0.15
"""Fraction of reserved-but-unused memory that stays reserved under memory pressure. Before it fails, the allocator releases
every empty segment (c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks), but not the free space in others. This value
best separates published runs that succeeded from those that failed; anything from 0 to 0.35 does nearly as well."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of the fullest pipeline rank at its peak: columns of many layouts, or scalars of one."""

    categories: dict[str, Floats]
    """Bytes by `CATEGORIES`; they sum to `allocated`."""
    allocated: Floats
    """Peak of live tensors: `torch.cuda.max_memory_allocated`."""
    reserved: Floats
    """`torch.cuda.max_memory_reserved`."""
    outside: Floats
    """CUDA context, NCCL, workspaces: the memory that `nvidia-smi` shows beyond `reserved`."""
    capacity: Floats
    """Memory of the device."""
    by_rank: Floats
    """Allocated by the first, a middle and the last rank of the pipeline, [3, layouts]; a sort that does not exist has 0."""
    moment: Column
    """Moment of the peak, an index into `plan.columns.rank_moments.MOMENTS`."""

    @property
    def needed(self) -> Floats:
        """Bytes that the device must have: live tensors, what the allocator cannot release, and memory outside torch."""
        return self.allocated + RETAINED_SHARE * (self.reserved - self.allocated) + self.outside

    @property
    def flushes(self) -> Bools:
        """True where the allocator's cache does not fit, so that it releases segments in every step."""
        return self.reserved + self.outside > self.capacity

    @property
    def headroom(self) -> Floats:
        """Usable bytes that are not needed; negative where the layout does not fit."""
        return self.capacity * (1 - MARGIN) - self.needed

    @property
    def fits(self) -> Bools:
        return self.headroom >= 0

    def replayed(self, peak: int) -> Footprint:
        """Footprint of one layout with `peak` bytes of live tensors, from a replay, in place of the columns' estimate."""
        more = peak - self.allocated
        return replace(self, allocated=self.allocated + more, reserved=self.reserved + more)

    def row(self, index: int) -> Footprint:
        """Footprint of one layout."""
        others = [getattr(self, column.name)[..., index] for column in fields(self) if column.name != "categories"]
        return Footprint({name: column[index] for name, column in self.categories.items()}, *others)

    @property
    def phase(self) -> str:
        """Name of the moment of the peak, for a footprint of one layout."""
        return MOMENTS[int(self.moment)]


def stage_memory(
    workload: Workload, table: LayoutTable, stages: Stages | None = None, schedule: Schedule | None = None
) -> Footprint:
    """Footprint of every layout of `table`. `stages`: if already computed; `schedule`: one from a file, for a table of its one
    layout."""
    stages = stages or partition_stages(workload, table)
    micro_batches = np.maximum(workload.sequences_per_batch // (table.dp * table.micro_batch_size), 1)
    state = rank_state(workload, table, stages, micro_batches)
    sums = np.where(state.gathers, np.stack([state.gradients, state.late_gradients], axis=1), 0.0)
    parts = rank_activations(workload, table, stages, micro_batches, schedule, sums)
    moments = rank_moments(workload, table, state, parts, micro_batches)

    exists = stages.exists > 0
    kept_beside = parts.dummies + _batch_bytes(workload, table) + fp8_bytes(workload, table, stages)
    always = state.weights + state.optimizer + kept_beside
    shape = (3, len(table))

    def columns(name: str) -> Floats:
        """[moments, 3, layouts]"""
        values = np.empty((len(moments), *shape))
        for row, source in zip(values, moments, strict=True):
            row[:] = getattr(source, name)
        return values

    live = columns("activations") + columns("gathered")
    for name in ("gradients", "buffers"):
        live += columns(name)
    sums = np.where(exists, live + always, 0.0)
    moment = sums.argmax(axis=0)
    by_rank = sums.max(axis=0)
    every, worst = np.arange(len(table)), by_rank.argmax(axis=0)
    when = moment[worst, every]

    def at(name: str) -> Floats:
        return columns(name)[when, worst, every]

    def of_worst(column: Floats) -> Floats:
        return (column if column.shape == shape else np.broadcast_to(column, shape))[worst, every]

    categories = {
        "weights": of_worst(state.weights),
        "gathered": at("gathered"),
        "gradients": at("gradients"),
        "optimizer": of_worst(state.optimizer),
        "activations": at("activations"),
        "buffers": at("buffers") + of_worst(kept_beside),
    }
    allocated = by_rank.max(axis=0)
    in_pools = (live - columns("aside") - columns("late")).max(axis=0) + late_bytes(moments) + always + aside_bytes(state)
    pooled = np.where(exists, np.maximum(in_pools, by_rank), 0.0).max(axis=0)
    capacity = np.full(len(table), workload.cluster.accelerator.memory_bytes.value)
    reserved = reserved_bytes(pooled, joins_segments=workload.stack.joins_segments)
    return Footprint(categories, allocated, reserved, outside_bytes(table), capacity, by_rank, when)


def _batch_bytes(workload: Workload, table: LayoutTable) -> Floats:
    """Bytes of tokens and targets of a rank's whole step, with documents also positions and document indices."""
    per_rank = workload.sequences_per_batch // table.dp * (workload.sequence_length // table.cp)
    arrays = (4 if workload.documents else 2) + bool(workload.model.dropout)  # keys of what is dropped
    return (per_rank * INDEX_BYTES * arrays).astype(np.float64)


CACHED_FRACTION = 0.03
"""Share of the peak reserved and not allocated. 0.01 to 0.03 in nanotron's logs (2024), 0.03 to 0.06 in SimuMax's on B200
(2026)."""
CACHED_BYTES = 0.5 * 2**30
LEFT_BYTES = 0.1 * 2**30
"""Replaces `CACHED_FRACTION` where buffers that fit no segment are counted one by one: the rest, blocks below 20 MiB."""
CONTEXT_BYTES = 0.6 * 2**30
"""CUDA's context and modules: 0.47 to 0.92 GiB on A100 and H100 (ml-engineering)."""
WORLD_BYTES = 0.4 * 2**30
"""NCCL's buffers of the communicator of all ranks: 0.33 GiB on 2 GPUs, 0.38 on 4 to 8 (aiconfigurator)."""
COMMUNICATOR_BYTES = 0.35 * 2**30
"""Bytes of each further communicator: 1.0 GiB for three, measured on H100 (pith-train)."""


def reserved_bytes(allocated: Floats, *, joins_segments: bool) -> Floats:
    """Bytes that torch's caching allocator reserves for a peak of `allocated`; `joins_segments` as in `Stack`."""
    return allocated * (1 + CACHED_FRACTION) + (CACHED_BYTES if joins_segments else LEFT_BYTES)


def live_limit(capacity_bytes: int, layout: Layout, *, joins_segments: bool) -> int:
    """Bytes of live tensors up to which `layout` fits a device of `capacity_bytes`. As `Footprint.fits`, for callers with a
    peak but no columns, so without `plan.columns.rank_moments.late_bytes`."""
    for_zero, for_one = (float(reserved_bytes(np.asarray(live), joins_segments=joins_segments)) for live in (0.0, 1.0))
    by_name = layout if layout.known_schedule else replace(layout, schedule=Layout.schedule)  # which changes nothing outside
    outside = float(outside_bytes(LayoutTable.of([by_name]))[0])
    return round(
        (capacity_bytes * (1 - MARGIN) - outside - RETAINED_SHARE * for_zero) / (1 + RETAINED_SHARE * (for_one - for_zero - 1))
    )


def outside_bytes(table: LayoutTable) -> Floats:
    """Bytes outside torch's allocator, [layouts]: the CUDA context and NCCL's communicators."""
    world = table.tp * table.cp * table.dp * table.pp
    of_data = (table.dp * table.cp > 1) & (table.tp * table.pp > 1)
    communicators = 1 * (table.tp > 1) + (table.pp > 1) + (table.cp > 1) + of_data + (table.ep > 1)
    return CONTEXT_BYTES + np.where(world > 1, WORLD_BYTES, 0.0) + COMMUNICATOR_BYTES * communicators
