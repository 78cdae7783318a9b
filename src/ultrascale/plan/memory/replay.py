"""Replay of a rank's memory over a step: every allocation and free of its actions, from the table of work.

    F     every operation allocates its result; tensors saved by autograd stay, others are freed after their last reader
    B     in reverse order: allocate the gradients of an operation's inputs and weights, free the tensors it saved
    step  the optimizer updates in place; gradients are freed

A formula that adds up parts misses the peak, where some activations are already freed and some gradients not yet allocated.
The replay follows `models.decoder`, autograd's order of release, `parallel.activations.recompute` and FSDP2
(`plan.memory.sharding`); other trainers by their stack files (`catalogue.stacks.stack`). It costs a fraction of a
millisecond a layer. Not included: workspace of kernels, fragmentation, the CUDA context and NCCL; the planner leaves headroom
for those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from ultrascale.catalogue.stacks.stack import Stack, StageCut, with_attention
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, is_hidden_matrix, weights, weights_outside_layers
from ultrascale.description.layout import DTYPE_BYTES, Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.plan.columns.block_memory import dummy_gradient_bytes
from ultrascale.plan.memory.ledger import Ledger, MemorySnapshot
from ultrascale.plan.memory.muon_update import muon_update_bytes
from ultrascale.plan.memory.sharding import Shards, scale_bytes, scale_tables, stays_whole
from ultrascale.plan.memory.stage_player import MailReplay, RankReplay, RecordedPasses, StagePlayer, alike
from ultrascale.plan.memory.stage_replay import BlockRecords, StageReplay
from ultrascale.plan.memory.stage_work import StagePart
from ultrascale.plan.memory.tally import Tally
from ultrascale.plan.pipeline.pipeline_activations import peak_activation_bytes
from ultrascale.plan.time.stage_cut import stage_layers
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Action, Kind, splits_backward
from ultrascale.schedules.build import build_schedule, enough_micro_batches, is_file, stages_of_ranks
from ultrascale.schedules.ends import mirror_of, ranks_sharing_embedding, shares_embedding
from ultrascale.schedules.messages import messages
from ultrascale.schedules.sharded import sharded
from ultrascale.work.fp8_slots import SLOT_BYTES, fp8_layers, gathers_fp8, is_delayed, num_block_slots
from ultrascale.work.recompute import recompute_in_stack, saved_bytes_by_kind
from ultrascale.work.sharding.owners import part_shape
from ultrascale.work.sharding.places import Coordinates
from ultrascale.work.work import Shape, block_work

OURS = STACKS["ultrascale"]
MAX_REPLAYED = 3
"""Micro-batches replayed without a pipeline: the first, one of those between (they are equal), and the last."""
WAITING_WEIGHTS = (0.0, 0.5, 1.0, 4.0)
TIED = "embed_tokens.weight"
INDEX_BYTES = 8
"""Bytes of a token, a target, a position or a document index: int64."""


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank (by default rank 0, which holds the largest shards), in bytes."""

    peak: MemorySnapshot
    """Highest total of any step."""
    peak_by_step: dict[int, MemorySnapshot]
    highest_by_step: dict[int, dict[str, int]]
    """Peak of each category in a step, each at its own moment."""
    before_update: MemorySnapshot
    """Just before the optimizer's update of the last step, with all gradients."""
    between_steps: MemorySnapshot
    """After the last step: parameters and optimizer state."""
    tally: Tally
    """Messages and FLOPs of the replayed micro-batches of the last step."""
    num_replayed: int
    """Number of micro-batches replayed, which stand for all `num_micro_batches`."""
    model: Model
    timeline: list[tuple[int, str, dict[str, int]]]
    num_micro_batches: int
    stack: Stack
    host_bytes: int = 0
    """Peak bytes of host memory: offloaded activations, and an offloaded optimizer's master weights, moments and gradients."""

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak, by category."""
        return self.peak.by_category

    @property
    def saved_by_layer(self) -> list[dict[str, int]]:
        """Bytes that each block saves for the backward pass of one micro-batch, by kind of operation."""
        layers = range(self.model.num_hidden_layers)
        return [_saved_by_kind(self.model, self.tally.layout, self.tally.shape, layer, self.stack) for layer in layers]


def plan_memory(
    model: Model,
    layout: Layout,
    *,
    sequence_length: int,
    sequences_per_batch: int,
    documents: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
    rank: int = 0,
    optimizer: str = "adamw",
    stack: Stack = OURS,
    expert_imbalance: float = 1.0,
    steps: int = 1,
    keeps_timeline: bool = False,
    passes: RecordedPasses | None = None,
) -> MemoryPlan:
    """Replay `steps` training steps of one rank; the default, rank 0, holds the largest shards.

    `documents`: packed documents with masks. `optimizer`: one of `catalogue.stacks.stack.OPTIMIZERS`; moments are allocated
    before the first step. `stack`: the trainer. `expert_imbalance`: rows of the busiest rank's experts over the mean.
    `passes`: passes recorded by other ranks of the same layout, called with the same arguments.
    Raises SpecError if the batch does not divide into micro-batches, or the pipeline schedule does not suit the layout.
    """
    passes = {} if passes is None else passes
    count = num_micro_batches(layout, sequences_per_batch)
    ledger, coordinates = Ledger(keeps_timeline=keeps_timeline), Coordinates.of(layout, rank)
    shape = rank_shape(layout, sequence_length, documents=documents, device=device, coordinates=coordinates, stack=stack)
    shape = replace(shape, expert_imbalance=expert_imbalance)
    model = padded(model, stack, layout.tp)
    tally, orders = Tally(layout, shape, coordinates.cp), _orders(layout, count, stack)
    parts = stage_parts(model, layout, sequence_length, coordinates, stack.stage_cut)
    records = BlockRecords()
    stages = {
        number: StageReplay(ledger, tally, model, part, coordinates, splits=orders.splits, stack=stack, records=records)
        for number, part in parts.items()
    }
    ledger.take("other", "batch", count * _batch_bytes(model, layout, shape, documents=documents))
    if stack.kernels.own_fp8:
        blocks = [n for part in parts.values() for n in part.layers]
        ledger.take("other", "history of fp8", fp8_history_bytes(model, layout, blocks))
    shards = [stage.shards for stage in stages.values()]
    held_weights = [weight for shard in shards for bucket in shard.buckets for weight in bucket.weights]
    ledger.take("other", "scales of weights in fp8", scale_bytes(scale_tables(model, layout, held_weights), layout))
    kinds = {model.is_moe(layer): layer for part in parts.values() for layer in part.layers}
    unread = dummy_gradient_bytes(model, tuple(kinds.values()), shape, stack=stack)
    ledger.take("other", "gradients that nobody reads", unread)
    outputs = _output_bytes(model, shape, parts, stack)
    ledger.take("activations", "outputs", outputs * max(0, count - orders.num_micro_batches))
    on_host, moments = 0, sum(shard.optimizer_bytes(bucket, optimizer) for shard in shards for bucket in shard.buckets)
    if layout.offload_optimizer:
        whole = {shard: shard.master_itemsize + shard.separate_master_itemsize for shard in shards}
        on_host, moments = (
            4 * sum(shard.shard_elements(bucket) * whole[shard] for shard in shards for bucket in shard.buckets),
            0,
        )
    wide = _update_bytes(model, layout, parts, shards, optimizer, device, rank)
    exchanged = max(exchanged_bytes(model, layout, rank, parts), default=0)
    ledger.take("optimizer", "moments", moments)
    between = before_update = ledger.now()
    for step in range(steps):
        tally.clear()
        _play_step(ledger, tally, stages, orders, step, coordinates, passes, outputs)
        ledger.touch("communication", "another rank's gradient", exchanged)
        ledger.mark("optimizer", step)
        before_update = ledger.now()
        ledger.touch("optimizer", "wide copies", wide)
        for shard in shards:
            shard.forget_gradients()
        between = ledger.now()
    ledger.mark("end", steps - 1)
    peaks = {step: peak for step, peak in ledger.peaks.items() if step < steps}
    return MemoryPlan(
        peak=max(peaks.values(), key=lambda moment: moment.total),
        peak_by_step=peaks,
        highest_by_step=ledger.highest,
        before_update=before_update,
        between_steps=between,
        tally=tally,
        num_replayed=orders.num_micro_batches,
        model=model,
        timeline=ledger.timeline,
        num_micro_batches=count,
        stack=stack,
        host_bytes=ledger.peak_on_host + on_host,
    )


def plan_fullest_rank(model: Model, layout: Layout, **options: Any) -> MemoryPlan:
    """`plan_memory` of the pipeline rank with the highest peak; `options` are those of `plan_memory`. Cached: plans and
    searches ask again for the same layouts."""
    plan = _plan_fullest_rank.__wrapped__ if is_file(layout.schedule) else _plan_fullest_rank  # a file may change
    return plan(model, layout, **options)


@lru_cache(maxsize=4096)
def _plan_fullest_rank(model: Model, layout: Layout, **options: Any) -> MemoryPlan:
    in_stage = layout.world_size // layout.pp
    stage_cut = options.get("stack", OURS).stage_cut
    ranks = _full_ranks(model, layout, options["sequence_length"], options["sequences_per_batch"], stage_cut)
    passes: RecordedPasses = {}
    plans = [plan_memory(model, layout, rank=rank * in_stage, passes=passes, **options) for rank in ranks]
    return max(plans, key=lambda plan: plan.peak.total)


def _full_ranks(model: Model, layout: Layout, sequence_length: int, sequences_per_batch: int, stage_cut: StageCut) -> list[int]:
    """Candidates for the pipeline rank with the highest peak (to within 1 percent): among ranks with the same kinds of layers,
    those that hold most activations by any measure of `_most_kept`."""
    if layout.pp == 1:
        return [0]
    orders = _orders(layout, num_micro_batches(layout, sequences_per_batch), OURS)
    layers_of_stages, last = stage_layers(model, layout, sequence_length, stage_cut), layout.num_stages - 1
    in_fp8 = fp8_layers(model, layout)
    kinds = [
        tuple((model.is_moe(layer), model.window(layer), layout.block_recompute(layer), layer in in_fp8) for layer in layers)
        for layers in layers_of_stages
    ]
    alike: dict[Any, list[tuple[list[float], int]]] = {}
    for rank, stages in enumerate(stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)):
        weights = WAITING_WEIGHTS if orders.splits else WAITING_WEIGHTS[:1]
        kept = _most_kept(orders.schedule[rank], kinds, {kinds[stage] for stage in stages}, weights)
        alike.setdefault(tuple((stage == 0, stage == last, kinds[stage]) for stage in stages), []).append((kept, rank))
    fullest = {
        max(group, key=lambda candidate: (candidate[0][measure], -candidate[1]))[1]
        for group in alike.values()
        for measure in range(len(group[0][0]))
    }
    return sorted(fullest)


def _most_kept(
    actions: Sequence[Action], kinds: Sequence[tuple[Any, ...]], rank_kinds: set[tuple[Any, ...]], weights: Sequence[float]
) -> list[float]:
    """Largest number of layers whose activations are live at once: over all stages of a rank and for each kind of stage, for
    each of `weights` (of a micro-batch between I and W relative to one between F and I; more with recomputation)."""
    kind_sets = (
        [rank_kinds] if len(rank_kinds) == 1 else [rank_kinds, *({kind} for kind in sorted(rank_kinds, key=kinds.index))]
    )
    return peak_activation_bytes(actions, [[len(kind) * (kind in counted) for kind in kinds] for counted in kind_sets], weights)


def rank_shape(
    layout: Layout, sequence_length: int, *, documents: bool, device: Literal["cpu", "cuda"],
    coordinates: Coordinates | None = None,
    stack: Stack = OURS,
) -> Shape:  # fmt: skip
    """Shape of one micro-batch on the rank at `coordinates` (None: see `Shape.coordinates`).

    Over cp our trainer's plan counts a sequence as one document, whatever `documents`: the upper bound of attention's work and
    traffic.
    """
    kernels = with_attention(stack, layout.attention).kernels
    documents = documents and not (kernels.own_fp8 and layout.cp > 1)
    if coordinates is not None:  # the other coordinates change no shape
        coordinates = coordinates._replace(pp=0, dp=0, expert_dp=0)
    return Shape(
        layout.micro_batch_size, sequence_length, layout.precision, documents, device, tp=layout.tp,
        sequence_parallel=layout.sequence_parallel, cp=layout.cp, cp_method=layout.cp_method, cp_heads=layout.cp_heads,
        ep=layout.ep, expert_tp=layout.expert_tp, mlp_chunks=layout.mlp_chunks,
        partition_checkpoints=layout.partition_checkpoints, coordinates=coordinates, fp8_scaling=layout.fp8_scaling,
        fp8_gathered=gathers_fp8(layout), kernels=kernels,
    )  # fmt: skip


def num_micro_batches(layout: Layout, sequences_per_batch: int) -> int:
    """Micro-batches of one rank in a step. Raises SpecError if the batch does not divide by dp x micro_batch_size."""
    together = layout.dp * layout.micro_batch_size
    if sequences_per_batch < together or sequences_per_batch % together:
        nearest = max(together, round(sequences_per_batch / together) * together)
        raise SpecError([
            Problem(
                "batch.sequences_per_batch",
                f"must be a multiple of dp x micro_batch_size = {layout.dp} x {layout.micro_batch_size} = {together}, "
                f"is {sequences_per_batch}",
                f"The nearest is {nearest}; or change layout.dp or layout.micro_batch_size.",
            )
        ])  # fmt: skip
    return sequences_per_batch // together


def fp8_history_bytes(model: Model, layout: Layout, layers: Sequence[int]) -> int:
    """Bytes of delayed fp8 scaling for the fp8 blocks among `layers`: each slot's amax history, scale, amax of this step and
    largest value of its format."""
    if not is_delayed(layout):
        return 0
    slots = sum(num_block_slots(model, layer) for layer in layers if layer in fp8_layers(model, layout))
    return SLOT_BYTES * slots * (layout.fp8_amax_history_len + 3)


def stage_parts(
    model: Model, layout: Layout, sequence_length: int, coordinates: Coordinates, stage_cut: StageCut = "balanced"
) -> dict[int, StagePart]:
    """Pipeline stages of the rank at `coordinates`, by number."""
    layers = model.num_hidden_layers
    predictions = range(layers, layers + model.num_nextn_predict_layers)
    if layout.pp == 1:
        return {0: StagePart(range(layers), predictions=predictions)}
    layers_of_stages, last = stage_layers(model, layout, sequence_length, stage_cut), layout.num_stages - 1
    stages = stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)[coordinates.pp]
    return {
        number: StagePart(layers_of_stages[number], number == 0, number == last, predictions if number == last else range(0))
        for number in stages
    }


def _update_bytes(
    model: Model, layout: Layout, parts: Mapping[int, StagePart], shards: list[Shards], optimizer: str, device: str, rank: int
) -> int:
    """Peak temporary bytes of an optimizer update."""
    if optimizer == "muon":
        return muon_update_bytes(muon_matrices(model, parts), layout, rank)
    return max((shard.update_bytes(optimizer, device) for shard in shards), default=0)


def exchanged_bytes(model: Model, layout: Layout, rank: int, parts: Mapping[int, StagePart]) -> list[int]:
    """Bytes of each gradient that a rank exchanges with another pipeline rank at the end of a step: the tied embedding's with
    the other end, all gradients with the mirror rank (DualPipe)."""
    pp_rank = Coordinates.of(layout, rank).pp
    other_ranks = ranks_sharing_embedding(layout, pp_rank) if shares_embedding(model, layout) else ()
    shared = (
        [weight for weight in weights_outside_layers(model) if weight.name == TIED] * len(other_ranks) if other_ranks else []
    )
    if mirror_of(layout, pp_rank) != pp_rank:
        shared += held_weights(model, parts)
    sizes = (prod(part_shape(weight, layout, rank)) * DTYPE_BYTES[layout.master_dtype] for weight in shared)
    return [size for size in sizes if size]


def held_weights(model: Model, parts: Mapping[int, StagePart]) -> list[Weight]:
    """The weights of a rank's stages, each once."""
    layers = {layer for part in parts.values() for layer in part.blocks}
    ends = {name for part in parts.values() for name in outside(model, part.is_first, part.is_last)}
    return [weight for weight in weights(model) if weight.layer in layers or weight.name in ends]


def outside(model: Model, is_first: bool, is_last: bool) -> set[str]:
    """Names of weights outside the blocks that the first or last stage holds."""
    read = {"embed_tokens.weight", "embed_positions.weight"}
    names = set(read) if is_first else set()
    if is_last:
        names |= {weight.name for weight in weights(model) if weight.layer is None} - read
        names |= {"embed_tokens.weight"} if model.tie_word_embeddings or model.num_nextn_predict_layers else set()
    return names


def padded(model: Model, stack: Stack, tp: int) -> Model:
    """`model` with the vocabulary padded as the trainer pads it."""
    multiple = stack.pads_vocab_to * tp
    if stack.pads_vocab_to == 1:
        return model
    return replace(model, vocab_size=-(-model.vocab_size // multiple) * multiple)


def _output_bytes(model: Model, shape: Shape, parts: Mapping[int, StagePart], stack: Stack) -> int:
    """Bytes of a micro-batch's logits, which some trainers' pipelines keep to the end of the step."""
    if not stack.keeps_outputs or not any(part.is_last and not part.is_first for part in parts.values()):
        return 0
    return shape.num_tokens * shape.tp_part(model.vocab_size) * shape.itemsize


def muon_matrices(model: Model, parts: Mapping[int, StagePart]) -> list[Weight]:
    """Matrices of a rank's stages that Muon updates; AdamW updates all other weights."""
    return list(filter(is_hidden_matrix, held_weights(model, parts)))


def _batch_bytes(model: Model, layout: Layout, shape: Shape, *, documents: bool) -> int:
    """Bytes of one micro-batch: tokens, targets, positions where the trainer passes them, document indices of the whole
    sequences, which our trainer keeps on the host under cp, keys of dropout."""
    token = shape.micro_batch_size * INDEX_BYTES
    local, whole = token * shape.local_length, token * shape.sequence_length
    has_positions = documents or layout.cp > 1
    on_host = layout.cp > 1 and shape.device != "cpu" and shape.kernels.own_fp8  # in our trainer
    alike = (
        0 if has_positions or layout.world_size == layout.dp else shape.local_length * INDEX_BYTES
    )  # one row for all sequences
    return (
        (3 if model.dropout else 2) * local + (local if has_positions else alike) + (whole if documents and not on_host else 0)
    )


class _Orders(NamedTuple):
    """Actions of a replayed step, by rank; one rank without a pipeline."""

    schedule: list[list[Action]]
    num_micro_batches: int
    splits: bool
    """True if any backward pass is split into I and W."""


def _orders(layout: Layout, count: int, stack: Stack) -> _Orders:
    """Actions of a step on all ranks, with the number of micro-batches capped, since later ones repeat the same bytes."""
    if layout.pp == 1:
        count = min(count, 1 if stays_whole(stack, layout) else MAX_REPLAYED)
        return _Orders([accumulate(count, layout.zero_stage)], count, False)
    if layout.known_schedule:
        count = enough_micro_batches(layout.schedule, layout.pp, count)
    build = _pipeline_orders.__wrapped__ if is_file(layout.schedule) else _pipeline_orders  # a file may change
    return build(layout.schedule, layout.pp, count, layout.virtual_stages)


@lru_cache(maxsize=4)
def _pipeline_orders(name: str, pp: int, count: int, virtual_stages: int) -> _Orders:
    """Actions of a pipeline's step; cached, because they do not depend on the rank that is replayed."""
    schedule = build_schedule(name, pp, count, virtual_stages)
    return _Orders(schedule, count, splits_backward(*schedule))


def _play_step(
    ledger: Ledger, tally: Tally, stages: Mapping[int, StageReplay], orders: _Orders, step: int, coordinates: Coordinates,
    passes: RecordedPasses, outputs: int,
) -> None:  # fmt: skip
    """Replay the passes of one step."""
    layout = tally.layout
    reduces_from = next(iter(stages.values())).stack.reduces_from
    if layout.pp == 1:
        for action in accumulate(orders.num_micro_batches, layout.zero_stage, reduces_from):
            ledger.mark("forward" if action.kind is Kind.FORWARD else "backward", step)
            if action.kind is Kind.FORWARD:
                stages[0].forward(action.micro_batch)
            else:
                stages[0].backward(action)
        return
    stage = next(iter(stages.values()))
    sent = messages(orders.schedule, _neighbours(layout, coordinates.pp))
    mail = MailReplay(ledger, tally, sent, coordinates.pp, stage.work.hidden_bytes, over_gloo=stage.shards.over_gloo)
    plain = ledger.keeps_timeline or layout.offload_activations
    players = {
        number: StagePlayer(replay_stage, passes.setdefault(alike(number, stages), {}))
        for number, replay_stage in stages.items()
    }
    played = stages if plain else players
    replay = RankReplay(ledger, played, mail, layout.num_stages - 1, outputs)
    replay.play(sharded(orders.schedule[coordinates.pp], layout.zero_stage, reduces_from), step)


def _neighbours(layout: Layout, rank: int) -> list[int]:
    """A pipeline rank and the ranks that hold the stages before and after its own, with which it exchanges messages."""
    stages_by_rank = stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    adjacent = {stage + more for stage in stages_by_rank[rank] for more in (-1, 0, 1)}
    return [rank_number for rank_number, stages in enumerate(stages_by_rank) if not adjacent.isdisjoint(stages)]


def _saved_by_kind(model: Model, layout: Layout, shape: Shape, layer: int, stack: Stack) -> dict[str, int]:
    """Bytes that a block holds between its forward and backward pass, by the kind of operation that produced them."""
    recomputation, hidden = (
        recompute_in_stack(stack, layout.block_recompute(layer), model, layer, layout),
        shape.outer_tokens * model.hidden_size * shape.itemsize,
    )
    return saved_bytes_by_kind(block_work(model, layer, shape), recomputation, hidden, stack.selective)
