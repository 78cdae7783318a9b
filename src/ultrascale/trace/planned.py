"""What the planner says of a rank, in the words of a trace: memory at the peak, messages of a step, FLOPs of a step.

All of it comes from the replay of memory, which counts what it does (`plan.tally`), and what is sent once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ultrascale.kernels.device_kind import Kind
from ultrascale.parallel.groups import ends_of, shares_embedding
from ultrascale.plan.ledger import Moment
from ultrascale.plan.memory import MemoryPlan, is_replayed, muon_matrices, num_micro_batches, plan_memory, stage_parts
from ultrascale.plan.tally import Traffic, Way, per_step
from ultrascale.spec.layout import DTYPE_BYTES, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.owners import exchanges, orthogonalising_flops, owned_shapes
from ultrascale.spec.places import Coordinates, place
from ultrascale.spec.run import Run
from ultrascale.spec.weights import Weight, weights

TIED = "embed_tokens.weight"
NORM_BYTES = 8
"""A sum of squares in fp64."""


@dataclass(frozen=True)
class Planned:
    """One step of a rank."""

    peak: Moment
    before_update: Moment
    """When all gradients are there."""
    traffic: dict[Way, Traffic]
    flops: int
    """Of matrix products, recomputed ones included; attention apart."""
    attention_flops: int
    """The full square of scores."""


def planned_rank(run: Run, rank: int, device: Kind) -> Planned | None:
    """None where the planner replays no steps of the layout (`plan.memory.is_replayed`)."""
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
    for exchange in exchanges(matrices, layout, rank):
        way = Way("all_to_all", *layout.group(exchange.axis))
        for elements in exchange.sent_elements:  # nothing too, from who owns none
            tally.counts[way] += 1
            tally.sizes[way] += elements * _iterated_itemsize(layout)
    products = tally.products + sum(orthogonalising_flops(shape) for shape in owned_shapes(matrices, layout, rank))
    return Planned(plan.peak_by_step[1], plan.before_update, tally.traffic, products, tally.attention)


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


def _once(run: Run, rank: int) -> Iterator[tuple[tuple[str, tuple[int, int]], int]]:
    """What `parallel.share` sends at the end of a step: shares of gradients that tp leaves, a tied embedding's, the norm."""
    model, layout = run.model, run.layout
    itemsize, at = DTYPE_BYTES[layout.master_dtype], Coordinates.of(layout, rank)
    parts = stage_parts(model, layout, run.batch.sequence_length, at).values()
    layers = {layer for part in parts for layer in part.blocks}
    ends = {name for part in parts for name in _outside(model, part.is_first, part.is_last)}
    shards = layout.group("shard")[0]
    shares: Counter[int] = Counter()
    for weight in weights(model):
        held = place(weight, layout, at)
        if held.is_partial and (weight.layer in layers or weight.name in ends):
            shares[held.copies] += -(-held.shape[0] // shards) * prod(held.shape[1:])
    for copies, elements in shares.items():
        yield ("all_reduce", (copies, 1)), elements * itemsize
    yield ("all_reduce", (layout.world_size, 1)), NORM_BYTES
    if shares_embedding(model, layout) and at.pp in ends_of(layout):
        held = next(weight for weight in weights(model) if weight.name == TIED)
        part = place(held, layout, at).shape
        yield ("send", (layout.pp, layout.group("pp")[1])), -(-part[0] // shards) * part[1] * itemsize


def _outside(model: Model, is_first: bool, is_last: bool) -> set[str]:
    """Names of weights outside the blocks that such a stage holds."""
    read = {"embed_tokens.weight", "embed_positions.weight"}
    held = set(read) if is_first else set()
    if is_last:
        held |= {weight.name for weight in weights(model) if weight.layer is None} - read
        held |= {"embed_tokens.weight"} if model.tie_word_embeddings or model.num_nextn_predict_layers else set()
    return held
