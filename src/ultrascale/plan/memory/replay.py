"""Replay of a rank's memory, moment by moment: the actions of a step over the table of work.

    F     every operation takes its result; what autograd saves stays, the rest goes after its last reader
    B     backwards: take the gradients of what an operation read and of its weights, let go of what it saved
    step  the optimizer updates in place; gradients are forgotten

A formula that adds up parts misses what decides: at the peak some activations are already gone and some gradients not yet
there. The replay follows `models.decoder`, autograd's order of release, `parallel.activations.recompute` and FSDP2
(`plan.memory.sharding`), other trainers by what their files say (`catalogue.stacks.stack`), and costs a millisecond a layer at
most. Not in it: what kernels take for themselves, fragmentation, the CUDA context and NCCL; `plan.fit` leaves room for those.
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
from ultrascale.plan.memory.stage_replay import StageReplay
from ultrascale.plan.memory.stage_work import StagePart
from ultrascale.plan.memory.tally import Tally
from ultrascale.plan.pipeline.pipeline_activations import peak_activation_bytes
from ultrascale.plan.time.stage_cut import stage_layers
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.build import build_schedule, is_file, stages_of_ranks
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
"""Micro-batches replayed: the first, one of those between (they are equal), and the last."""
MAX_IN_FLIGHT = 4
"""In a pipeline, for each of its stages: more of them repeat what was there. Where all go forward first, all are replayed."""
WAITING_WEIGHTS = (0.0, 0.5, 1.0, 4.0)
TIED = "embed_tokens.weight"
INDEX_BYTES = 8
"""Bytes of a token, a target, a position or a document's number: int64."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank (rank 0, which holds the largest shards), in bytes."""

    peak: MemorySnapshot
    """The highest moment of any step."""
    peak_by_step: dict[int, MemorySnapshot]
    """Step 0 differs from the later ones only if the optimizer's state is made by the first update."""
    highest_by_step: dict[int, dict[str, int]]
    """The most of each category in a step, whenever that was."""
    before_update: MemorySnapshot
    """When all gradients are there, in the last step."""
    between_steps: MemorySnapshot
    """Parameters and optimizer state, when nothing runs."""
    tally: Tally
    """Messages and FLOPs of the last step, of the micro-batches that were replayed."""
    num_replayed: int
    """Micro-batches: some stand for all."""
    model: Model
    timeline: list[tuple[int, str, dict[str, int]]]
    num_micro_batches: int
    stack: Stack
    host_bytes: int = 0
    """In the host's memory at most: offloaded activations, and of an offloaded optimizer masters, moments and gradients."""

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
    optimizer_state_exists: bool = True,
    stack: Stack = OURS,
    expert_imbalance: float = 1.0,
    steps: int = 1,
    keeps_timeline: bool = False,
    passes: RecordedPasses | None = None,
) -> MemoryPlan:
    """Replay `steps` training steps of one rank: of the first, which holds the largest parts, or another.

    `documents`: packed documents with masks. `optimizer`: one of `catalogue.stacks.stack.OPTIMIZERS`.
    `optimizer_state_exists`: moments are there before the first step (as our trainer makes them), not made by the first
    update. `stack`: the trainer. `expert_imbalance`: rows of the busiest rank's experts over the mean. `passes`: what other
    ranks of the same layout, asked in the same words, have written down of theirs.
    Raises SpecError if the batch cannot be cut into micro-batches, or the pipeline's schedule does not suit.
    """
    passes = passes or RecordedPasses({}, {})
    count = num_micro_batches(layout, sequences_per_batch)
    ledger, coordinates = Ledger(keeps_timeline=keeps_timeline), Coordinates.of(layout, rank)
    shape = rank_shape(layout, sequence_length, documents=documents, device=device, coordinates=coordinates, stack=stack)
    shape = replace(shape, expert_imbalance=expert_imbalance)
    model = padded(model, stack, layout.tp)
    tally, orders = Tally(layout, shape, coordinates.cp), _orders(layout, count, stack)
    parts = stage_parts(model, layout, sequence_length, coordinates, stack.stage_cut)
    stages = {
        number: StageReplay(ledger, tally, model, part, coordinates, splits=orders.splits, stack=stack, entries=passes.blocks)
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
    between = before_update = ledger.now()
    for step in range(steps):
        if step == 0 and optimizer_state_exists:
            ledger.take("optimizer", "moments", moments)
        tally.clear()
        _play_step(ledger, tally, stages, orders, step, coordinates, passes, outputs)
        ledger.touch("communication", "another rank's gradient", exchanged)
        ledger.mark("optimizer", step)
        before_update = ledger.now()
        ledger.touch("optimizer", "wide copies", wide)
        if step == 0 and not optimizer_state_exists:
            ledger.take("optimizer", "moments", moments)
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
    """`plan_memory` of the rank of the pipeline that needs most; `options` are its own. The last few are kept: a search asks
    for its best layouts, and the plan of the one that is chosen for it again."""
    plan = _plan_fullest_rank.__wrapped__ if is_file(layout.schedule) else _plan_fullest_rank  # a file may change
    return plan(model, layout, **options)


@lru_cache(maxsize=16)
def _plan_fullest_rank(model: Model, layout: Layout, **options: Any) -> MemoryPlan:
    in_stage = layout.world_size // layout.pp
    stage_cut = options.get("stack", OURS).stage_cut
    ranks = _full_ranks(model, layout, options["sequence_length"], options["sequences_per_batch"], stage_cut)
    passes = RecordedPasses({}, {})
    plans = [plan_memory(model, layout, rank=rank * in_stage, passes=passes, **options) for rank in ranks]
    return max(plans, key=lambda plan: plan.peak.total)


def _full_ranks(model: Model, layout: Layout, sequence_length: int, sequences_per_batch: int, stage_cut: StageCut) -> list[int]:
    """Ranks of a pipeline of which one needs most, or within 1 percent of it: of those with the same kinds of layers the ones
    whose actions keep most, by any of the measures of `_most_kept`."""
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
    """Layers whose activations live at once, at most: of all stages of a rank, of each kind of them, and whatever a micro-batch
    between I and W weighs against one between F and I: less where nothing is recomputed, more where all is."""
    kind_sets = (
        [rank_kinds] if len(rank_kinds) == 1 else [rank_kinds, *({kind} for kind in sorted(rank_kinds, key=kinds.index))]
    )
    return peak_activation_bytes(actions, [[len(kind) * (kind in counted) for kind in kinds] for counted in kind_sets], weights)


def rank_shape(
    layout: Layout, sequence_length: int, *, documents: bool, device: Literal["cpu", "cuda"],
    coordinates: Coordinates | None = None,
    stack: Stack = OURS,
) -> Shape:  # fmt: skip
    """One micro-batch on one rank: on that at `coordinates`, or as `Shape.coordinates` says without.

    Over cp ours takes a sequence for one document, whatever `documents`: the most that attention can have to do and to send.
    """
    kernels = with_attention(stack, layout.attention).kernels
    documents = documents and not (kernels.own_fp8 and layout.cp > 1)
    if coordinates is not None:  # what else it stands for changes no shape
        coordinates = coordinates._replace(pp=0, dp=0, expert_dp=0)
    return Shape(
        layout.micro_batch_size, sequence_length, layout.precision, documents, device, tp=layout.tp,
        sequence_parallel=layout.sequence_parallel, cp=layout.cp, cp_method=layout.cp_method, cp_heads=layout.cp_heads,
        ep=layout.ep, expert_tp=layout.expert_tp, mlp_chunks=layout.mlp_chunks,
        partition_checkpoints=layout.partition_checkpoints, coordinates=coordinates, fp8_scaling=layout.fp8_scaling,
        fp8_gathered=gathers_fp8(layout), kernels=kernels,
    )  # fmt: skip


def num_micro_batches(layout: Layout, sequences_per_batch: int) -> int:
    """Forward passes of one rank in a step. Raises SpecError if the batch does not divide."""
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
    """Bytes of delayed scaling for the blocks in fp8 among `layers`: each slot's history, scale, largest magnitude of this step
    and largest number of its format."""
    if not is_delayed(layout):
        return 0
    slots = sum(num_block_slots(model, layer) for layer in layers if layer in fp8_layers(model, layout))
    return SLOT_BYTES * slots * (layout.fp8_amax_history_len + 3)


def stage_parts(
    model: Model, layout: Layout, sequence_length: int, coordinates: Coordinates, stage_cut: StageCut = "balanced"
) -> dict[int, StagePart]:
    """The stages of the rank at `coordinates`, by number."""
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
    """Peak of temporary bytes in an optimizer's update."""
    if optimizer == "muon":
        return muon_update_bytes(muon_matrices(model, parts), layout, rank)
    return max((shard.update_bytes(optimizer, device) for shard in shards), default=0)


def exchanged_bytes(model: Model, layout: Layout, rank: int, parts: Mapping[int, StagePart]) -> list[int]:
    """Bytes of each gradient that a rank exchanges with another of its pipeline at the end of a step: a tied embedding's with
    the other end, all with a mirror (DualPipe)."""
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
    """Names of weights outside the blocks that such a stage holds."""
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
    """Logits of a micro-batch that a pipeline keeps for its caller."""
    if not stack.keeps_outputs or not any(part.is_last and not part.is_first for part in parts.values()):
        return 0
    return shape.num_tokens * shape.tp_part(model.vocab_size) * shape.itemsize


def muon_matrices(model: Model, parts: Mapping[int, StagePart]) -> list[Weight]:
    """Matrices of a rank's stages that Muon updates; AdamW updates all other weights."""
    layers = {layer for part in parts.values() for layer in part.blocks}
    return [weight for weight in weights(model) if weight.layer in layers and is_hidden_matrix(weight)]


def _batch_bytes(model: Model, layout: Layout, shape: Shape, *, documents: bool) -> int:
    """Bytes of one micro-batch: tokens, targets, positions wherever the trainer gives them, documents of the whole
    sequences, keys of dropout."""
    token = shape.micro_batch_size * INDEX_BYTES
    local, whole = token * shape.local_length, token * shape.sequence_length
    has_positions = documents or layout.cp > 1
    alike = (
        0 if has_positions or layout.world_size == layout.dp else shape.local_length * INDEX_BYTES
    )  # one row for all sequences
    return (3 if model.dropout else 2) * local + (local if has_positions else alike) + (whole if documents else 0)


class _Orders(NamedTuple):
    """A step as it is replayed: without a pipeline a list of one rank."""

    schedule: list[list[Action]]
    num_micro_batches: int
    splits: bool
    """True if any backward pass is split into I and W."""


def _orders(layout: Layout, count: int, stack: Stack) -> _Orders:
    """Orders of a step on all ranks, with only some of many micro-batches that come and go alike."""
    if layout.pp == 1:
        count = min(count, 1 if stays_whole(stack, layout) else MAX_REPLAYED)
        return _Orders([accumulate(count, layout.zero_stage)], count, False)
    if (known := layout.known_schedule) and not known.forward_first:
        count = min(count, MAX_IN_FLIGHT * layout.num_stages)
    build = _pipeline_orders.__wrapped__ if is_file(layout.schedule) else _pipeline_orders  # a file may change
    return build(layout.schedule, layout.pp, count, layout.virtual_stages)


@lru_cache(maxsize=4)
def _pipeline_orders(name: str, pp: int, count: int, virtual_stages: int) -> _Orders:
    """Orders of a pipeline's step, kept: every rank has the same."""
    schedule = build_schedule(name, pp, count, virtual_stages)
    splits = any(part.kind is Kind.INPUT_GRADIENT for row in schedule for action in row for part in action.parts)
    return _Orders(schedule, count, splits)


def _play_step(
    ledger: Ledger, tally: Tally, stages: Mapping[int, StageReplay], orders: _Orders, step: int, coordinates: Coordinates,
    passes: RecordedPasses, outputs: int,
) -> None:  # fmt: skip
    """The passes of a step."""
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
        number: StagePlayer(replay_stage, passes.stages.setdefault(alike(number, stages), {}))
        for number, replay_stage in stages.items()
    }
    played = stages if plain else players
    replay = RankReplay(ledger, played, mail, layout.num_stages - 1, outputs)
    replay.play(sharded(orders.schedule[coordinates.pp], layout.zero_stage, reduces_from), step)


def _neighbours(layout: Layout, rank: int) -> list[int]:
    """A pipeline rank, and those with which it exchanges messages: they hold the stages before and after its own."""
    stages_by_rank = stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    adjacent = {stage + more for stage in stages_by_rank[rank] for more in (-1, 0, 1)}
    return [rank_number for rank_number, stages in enumerate(stages_by_rank) if not adjacent.isdisjoint(stages)]


def _saved_by_kind(model: Model, layout: Layout, shape: Shape, layer: int, stack: Stack) -> dict[str, int]:
    """Bytes a block holds between its forward and its backward pass, by the kind of operation that made them."""
    recomputation, hidden = (
        recompute_in_stack(stack, layout.block_recompute(layer), model, layer, layout),
        shape.outer_tokens * model.hidden_size * shape.itemsize,
    )
    return saved_bytes_by_kind(block_work(model, layer, shape), recomputation, hidden, stack.selective)
