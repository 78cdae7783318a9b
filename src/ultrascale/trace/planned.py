"""What the planner says of a rank, in the words of a trace: memory at the peak, messages of a step, FLOPs of a step.

All of it comes from the replay of memory, which counts what it does (`plan.memory.tally`), and what is sent once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from ultrascale.kernels.device_kind import Kind
from ultrascale.plan.memory.ledger import Moment
from ultrascale.plan.memory.replay import (
    MemoryPlan,
    is_replayed,
    muon_matrices,
    num_micro_batches,
    plan_memory,
    stage_parts,
    tied_bytes,
)
from ultrascale.plan.memory.sharding import scale_messages, scale_tables
from ultrascale.plan.memory.tally import Traffic, Way, per_step
from ultrascale.spec.fp8_slots import SLOT_BYTES, num_slots
from ultrascale.spec.layout import DTYPE_BYTES, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.owners import exchanges, members, orthogonalising_flops, owned_shapes, part_shape, slice_spans
from ultrascale.spec.places import Coordinates, place
from ultrascale.spec.run import Run
from ultrascale.spec.stack import SCALED_TOGETHER, UPDATED_TOGETHER
from ultrascale.spec.weights import Weight, weights

NORM_BYTES = 8
"""A sum of squares in fp64."""
SCALE_BYTES, MOMENTS = 4, 2
"""Of a scale of moments in 8 bits, fp32; and how many there are of a weight."""


@dataclass(frozen=True)
class Planned:
    """One step of a rank."""

    peak: Moment
    highest: dict[str, int]
    """The most of each category of memory, whenever that is."""
    before_update: Moment
    """When all gradients are there."""
    traffic: dict[Way, Traffic]
    flops: int
    """Of matrix products, recomputed ones included; attention apart."""
    attention_flops: int
    """The full square of scores."""


def planned_rank(run: Run, rank: int, device: Kind) -> Planned | None:
    """None where the planner replays no steps of the layout (`plan.memory.replay.is_replayed`)."""
    layout = run.layout
    if not is_replayed(run.model, layout):
        return None
    count = num_micro_batches(layout, run.batch.sequences_per_batch)
    plan = _plan(run, rank, device, count)
    tally = plan.tally
    if plan.num_replayed < count:
        fewer = _plan(run, rank, device, plan.num_replayed - 1).tally
        tally = per_step(tally, fewer, count - plan.num_replayed)
    for way, num_bytes in _once(run, rank):
        tally.send(*way, num_bytes)
    matrices = _matrices(run, rank)
    for way, num_bytes in _scales(run, rank, device):
        tally.send(*way, num_bytes)
    for exchange in exchanges(matrices, layout, rank):
        way = Way("all_to_all", *layout.group(exchange.axis))
        for elements in exchange.sent_elements:  # nothing too, from who owns none
            tally.counts[way] += 1
            tally.sizes[way] += elements * _iterated_itemsize(layout)
    products = tally.products + sum(orthogonalising_flops(shape) for shape in owned_shapes(matrices, layout, rank))
    return Planned(plan.peak_by_step[1], plan.highest_by_step[1], plan.before_update, tally.traffic, products, tally.attention)


def _matrices(run: Run, rank: int) -> list[Weight]:
    """What Muon works on, of the rank's stages."""
    if run.optimizer.name != "muon":
        return []
    parts = stage_parts(run.model, run.layout, run.batch.sequence_length, Coordinates.of(run.layout, rank))
    return muon_matrices(run.model, parts)


def _iterated_itemsize(layout: Layout) -> int:
    """Of an element of a matrix as Muon sends it and works on it."""
    return DTYPE_BYTES["fp64" if layout.master_dtype == "fp64" else "bf16"]


def _plan(run: Run, rank: int, device: Kind, count: int) -> MemoryPlan:
    """Of two steps of so many micro-batches."""
    layout = run.layout
    return plan_memory(
        run.model, layout, sequence_length=run.batch.sequence_length,
        sequences_per_batch=count * layout.dp * layout.micro_batch_size, documents=run.data.document_mask, device=device,
        rank=rank, steps=2, optimizer=run.optimizer.name,
    )  # fmt: skip


def _scales(run: Run, rank: int, device: Kind) -> Iterator[tuple[tuple[str, tuple[int, int]], int]]:
    """What ranks of tp send for scales of moments in 8 bits, where they cut blocks of a row (`train.compact_adamw`)."""
    layout = run.layout
    for weight in _held(run, rank) if run.optimizer.name == "adamw-8bit" else ():
        axis, whole = "expert_tp" if weight.is_expert else "tp", weight.shape[-1]
        if len(weight.shape) == 1 or weight.tp_dim != len(weight.shape) - 1 or layout.group(axis)[0] == 1:
            continue
        spans = slice_spans(weight, layout, members(layout, axis, rank))
        if any(span.first % SCALED_TOGETHER for span in spans):
            rows, together = prod(part_shape(weight, layout, rank)[:-1]), max(1, UPDATED_TOGETHER[device] // whole)
            for first in range(0, rows, together):
                num_bytes = min(together, rows - first) * -(-whole // SCALED_TOGETHER) * SCALE_BYTES
                yield from [(("all_reduce", layout.group(axis)), num_bytes)] * MOMENTS


def _held(run: Run, rank: int) -> Iterator[Weight]:
    """The weights of a rank's stages."""
    parts = stage_parts(run.model, run.layout, run.batch.sequence_length, Coordinates.of(run.layout, rank)).values()
    layers = {layer for part in parts for layer in part.blocks}
    ends = {name for part in parts for name in _outside(run.model, part.is_first, part.is_last)}
    return (weight for weight in weights(run.model) if weight.layer in layers or weight.name in ends)


def _once(run: Run, rank: int) -> Iterator[tuple[tuple[str, tuple[int, int]], int]]:
    """What `parallel.share` sends at the end of a step: shares of gradients that tp leaves, a tied embedding's, the norm,
    what delayed scales of fp8 follow from; and before the next what scales of weights gathered in fp8 do."""
    model, layout = run.model, run.layout
    itemsize, at = DTYPE_BYTES[layout.master_dtype], Coordinates.of(layout, rank)
    shares: Counter[int] = Counter()
    for weight in _held(run, rank):
        held = place(weight, layout, at)
        if held.is_partial:
            shares[held.copies] += prod(part_shape(weight, layout, rank))
    for copies, elements in shares.items():
        yield ("all_reduce", (copies, 1)), elements * itemsize
    yield ("all_reduce", (layout.world_size, 1)), NORM_BYTES
    yield ("all_reduce", (layout.world_size, 1)), num_slots(model, layout) * SLOT_BYTES
    whole = [replace(weight, shape=place(weight, layout, at).shape) for weight in _held(run, rank)]
    for group, num_bytes in scale_messages(scale_tables(model, layout, whole), layout):
        yield ("all_reduce", group), num_bytes
    if shared := tied_bytes(model, layout, rank, at):
        yield ("send", (layout.pp, layout.group("pp")[1])), shared


def _outside(model: Model, is_first: bool, is_last: bool) -> set[str]:
    """Names of weights outside the blocks that such a stage holds."""
    read = {"embed_tokens.weight", "embed_positions.weight"}
    held = set(read) if is_first else set()
    if is_last:
        held |= {weight.name for weight in weights(model) if weight.layer is None} - read
        held |= {"embed_tokens.weight"} if model.tie_word_embeddings or model.num_nextn_predict_layers else set()
    return held
