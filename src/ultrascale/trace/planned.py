"""What the planner says of a rank, in the words of a trace: memory at the peak, messages of a step, FLOPs of a step.

Messages of blocks and ends are those of `spec.work`, of a pipeline those of its schedule, of parameters and gradients those of
the replay of memory (`plan.sharding`), in which each gather and each reduction takes its buffer. FLOPs are the table of work's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ultrascale.kernels.device_kind import Kind
from ultrascale.plan.ledger import Moment
from ultrascale.plan.memory import (
    MAX_IN_FLIGHT,
    MAX_REPLAYED,
    is_replayed,
    num_micro_batches,
    plan_memory,
    rank_shape,
    stage_parts,
)
from ultrascale.plan.recomputed_ops import computed_again
from ultrascale.plan.sharding import Bucket, Shards
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.messages import messages
from ultrascale.spec.layout import DTYPE_BYTES, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.ops import Collective, Op
from ultrascale.spec.places import Coordinates, place
from ultrascale.spec.run import Run
from ultrascale.spec.weights import weights
from ultrascale.spec.work import Shape, block_work, embedding_work, head_work
from ultrascale.trace.pretend import replaced

NORM_BYTES = 8
"""A sum of squares in fp64."""
WITH_W = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that cut backward passes in two."""
FEW = MAX_REPLAYED
"""Micro-batches whose data-parallel messages are counted: each more sends what the last of them did."""


class Way(NamedTuple):
    """Messages that are counted together."""

    kind: str
    size: int
    stride: int


class Traffic(NamedTuple):
    """How many, and their bytes."""

    count: int
    num_bytes: int


@dataclass(frozen=True)
class Planned:
    """One step of a rank."""

    peak: Moment
    traffic: dict[Way, Traffic]
    flops: int
    """Of matrix products, recomputed ones included; attention apart."""
    attention_flops: int
    """The full square of scores."""


def planned_rank(run: Run, rank: int, device: Kind) -> Planned | None:
    """None where the planner replays no steps of the layout (`plan.memory.is_replayed`)."""
    if not is_replayed(run.model, run.layout):
        return None
    batch = run.batch
    peak = plan_memory(
        run.model, run.layout, sequence_length=batch.sequence_length, sequences_per_batch=batch.sequences_per_batch,
        documents=run.data.document_mask, device=device, rank=rank, steps=2, optimizer=run.optimizer.name,
    ).peak_by_step[1]  # fmt: skip
    shape = rank_shape(run.layout, batch.sequence_length, documents=run.data.document_mask, device=device)
    parts = _parts(run, shape, rank)
    products, attention = _flops(run, parts)
    return Planned(peak, _traffic(run, rank, device, parts), products, attention)


class Piece(NamedTuple):
    """Operations of a block (or of an end, without number), once a micro-batch."""

    layer: int | None
    ops: tuple[Op, ...]


def _parts(run: Run, shape: Shape, rank: int) -> list[Piece]:
    model, found = run.model, []
    at = Coordinates.of(run.layout, rank)
    for part in stage_parts(model, run.layout, run.batch.sequence_length, at).values():
        found += [Piece(None, embedding_work(model, shape))] if part.is_first else []
        found += [Piece(layer, block_work(model, layer, shape)) for layer in part.layers]
        found += [Piece(None, head_work(model, shape))] if part.is_last else []
    return found


def _flops(run: Run, parts: list[Piece]) -> tuple[int, int]:
    """Of products and of attention."""
    count = num_micro_batches(run.layout, run.batch.sequences_per_batch)
    products = attention = 0
    for layer, ops in parts:
        for op in ops:
            amount = op.flops + op.backward_flops
            if op.kind == "attention":
                attention += amount
            else:
                products += amount
        # A product of tp is one operation with its sum, and torch stops behind it; so it is with rows of experts, and where W
        # has a product as an operation of its own.
        whole = run.layout.tp > 1 or run.model.is_moe(layer or 0) or (run.layout.pp > 1 and run.layout.schedule in WITH_W)
        for op in computed_again(run.layout, layer, ops, stops_behind=whole):
            if op.kind == "attention":
                attention += op.flops
            else:
                products += op.flops
    return products * count, attention * count


def _traffic(run: Run, rank: int, device: Kind, parts: list[Piece]) -> dict[Way, Traffic]:
    layout = run.layout
    found: Counter[Way] = Counter()
    sizes: Counter[Way] = Counter()
    count = num_micro_batches(layout, run.batch.sequences_per_batch)
    for layer, ops in parts:
        items = [item for op in ops for item in op.collectives]
        items += [item for op in sent_again(layout, layer, ops) for item in op.collectives if item.when == "forward"]
        for item in items:
            way = Way(_kind(item, layout, device), *layout.group(item.axis))
            found[way] += count
            sizes[way] += round(item.num_bytes * _share_that_leaves(item, layout)) * count
    for way, number, num_bytes in [*_data(run, rank, device, count), *_pipeline(run, rank, count), *_once(run, rank)]:
        found[way] += number
        sizes[way] += num_bytes
    return {way: Traffic(found[way], sizes[way]) for way in found if way.size > 1}


def _kind(item: Collective, layout: Layout, device: Kind) -> str:
    """As what the trainer sends it: over cp mostly messages of their own, sums of experts' rows an exchange and additions."""
    if item.axis == "cp":
        return item.kind if layout.cp_method == "all-gather" and device == "cuda" else "send"
    return "all_to_all" if item.axis == "expert_tp" and item.kind == "reduce_scatter" else item.kind


def _share_that_leaves(item: Collective, layout: Layout) -> float:
    """Of cp what is told is what leaves a rank."""
    return (layout.cp - 1) / layout.cp * item.sent_share if item.axis == "cp" else 1.0


def sent_again(layout: Layout, layer: int | None, ops: tuple[Op, ...]) -> list[Op]:
    """Operations whose messages recomputation repeats: up to the last that saves something, with the sum that it is one with;
    or those whose results selective recomputation does not keep."""
    last = max((index for index, op in enumerate(ops) if op.saves), default=-1)
    again = None if layer is None else layout.again(layer)
    if again is None:
        return []
    run = ops[: last + 1 + ops[last].makes_partial_sums]
    if again.whole:
        return list(run)
    made_again = [op for op in run if op.again_kind in again.kinds]
    read = {name for op in made_again for name in op.reads}
    return [op for op in run if op in made_again or op.name == "mlp.expert_gather"
            or any(item.axis == "cp" for item in op.collectives)
            or (op.kind == "gather" and op.makes[0].name in read)]  # fmt: skip


def _pipeline(run: Run, rank: int, count: int) -> Iterator[tuple[Way, int, int]]:
    """What a rank sends to the stages before and after it."""
    layout = run.layout
    if layout.pp == 1:
        return
    shape = rank_shape(layout, run.batch.sequence_length, documents=run.data.document_mask, device="cuda")
    size = shape.outer_tokens * run.model.hidden_size * shape.itemsize
    schedule = build_schedule(layout.schedule, layout.pp, count, layout.virtual_stages)
    number = sum(message.sender == Coordinates.of(layout, rank).pp for message in messages(schedule))
    yield Way("send", layout.pp, layout.tp * layout.cp * layout.dp), number, number * size


def _once(run: Run, rank: int) -> Iterator[tuple[Way, int, int]]:
    """What `parallel.share` sends at the end of a step: shares of gradients that tp leaves, a tied embedding's, the norm."""
    model, layout = run.model, run.layout
    itemsize, at = DTYPE_BYTES[layout.master_dtype], Coordinates.of(layout, rank)
    parts = stage_parts(model, layout, run.batch.sequence_length, at).values()
    layers = {layer for part in parts for layer in part.layers}
    ends = {name for part in parts for name in _outside(model, part.is_first, part.is_last)}
    shards = layout.group("shard")[0]
    shares: Counter[int] = Counter()
    for weight in weights(model):
        held = place(weight, layout, at)
        if held.is_partial and (weight.layer in layers or weight.name in ends):
            shares[held.copies] += -(-held.shape[0] // shards) * prod(held.shape[1:])
    for copies, elements in shares.items():
        yield Way("all_reduce", copies, 1), 1, elements * itemsize
    yield Way("all_reduce", layout.world_size, 1), 1, NORM_BYTES


def _outside(model: Model, is_first: bool, is_last: bool) -> set[str]:
    """Names of weights outside the blocks that such a stage holds."""
    read = {"embed_tokens.weight", "embed_positions.weight"}
    held = set(read) if is_first else set()
    if is_last:
        held |= {weight.name for weight in weights(model) if weight.layer is None} - read
        held |= {"embed_tokens.weight"} if model.tie_word_embeddings else set()
    return held


def _data(run: Run, rank: int, device: Kind, count: int) -> list[tuple[Way, int, int]]:
    """Gathers of parameters and reductions of gradients."""
    most = FEW if run.layout.pp == 1 else MAX_IN_FLIGHT * run.layout.num_stages
    if count <= most:
        found = _data_of(run, rank, device, count)
    else:
        few, fewer = _data_of(run, rank, device, most), _data_of(run, rank, device, most - 1)
        more = count - most
        found = {way: tuple(a + more * (a - b) for a, b in zip(few[way], fewer[way], strict=True)) for way in few}
    return [(way, number, size) for way, (number, size) in found.items()]


def _data_of(run: Run, rank: int, device: Kind, count: int) -> dict[Way, Any]:
    layout = run.layout
    found: dict[Way, list[int]] = {}
    with _watched_shards(layout, found):
        plan_memory(
            run.model, layout, sequence_length=run.batch.sequence_length,
            sequences_per_batch=count * layout.dp * layout.micro_batch_size, documents=run.data.document_mask, device=device,
            rank=rank, optimizer=run.optimizer.name,
        )  # fmt: skip
    return found


@contextmanager
def _watched_shards(layout: Layout, found: dict[Way, list[int]]) -> Iterator[None]:
    """Note what the replay gathers and reduces."""
    gather, reduce = Shards._start_gather, Shards._reduce

    def note(kind: str, group: tuple[int, int], num_bytes: int) -> None:
        if group[0] > 1:
            total = found.setdefault(Way(kind, *group), [0, 0])
            total[0] += 1
            total[1] += num_bytes

    def groups(shards: Shards, bucket: Bucket) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the ranks that cut a bucket, and of those that repeat it."""
        if bucket.ranks is None:
            return layout.group("shard"), layout.group("replicate")
        size, stride = bucket.ranks, layout.group("expert_dp")[1]
        return (size, stride), (layout.expert_dp // size, stride * size)

    def gathered(self: Shards, bucket: Bucket) -> None:
        if bucket.flat is None and bucket.parameters is None and bucket.weights:
            note("all_gather", groups(self, bucket)[0], self.padded_elements(bucket) * self.compute_itemsize)
        gather(self, bucket)

    def reduced(self: Shards, bucket: Bucket, action: Any) -> None:
        if bucket.weights:
            shard, copies = groups(self, bucket)
            size = self.padded_elements(bucket) * self.reduce_itemsize
            note("reduce_scatter", shard, size)
            if action.sum_replicas:
                note("all_reduce", copies, size // self.ranks_of(bucket))
        reduce(self, bucket, action)

    with replaced(Shards, "_start_gather", gathered), replaced(Shards, "_reduce", reduced):
        yield
