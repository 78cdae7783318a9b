"""Forward and backward passes of one stage on one rank, replayed operation by operation; `plan.memory.replay` drives it.

    F     every operation allocates its result; tensors saved by autograd stay, others are freed after their last reader
    B     in reverse order: allocate the gradients of an operation's inputs and weights, free the tensors it saved
    I     as B, but linear layers keep their input and output gradient instead of computing weight gradients; under sequence
          parallelism only this rank's positions of the gathered one
    W     compute the deferred weight gradients; gathers those inputs or gradients again

Without a pipeline the stage is the whole model. FSDP2's part is in `plan.memory.sharding`.

A stage has many equal blocks. A pass of a block in a given state of the buckets is replayed once, and its effect recorded; for
further blocks of its kind the record is applied (`BlockRecord`), and their tensors do not exist (`RecordedBlock`). The first
block of a kind is always replayed: it holds the stage's input, and what all blocks read, to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar, cast

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import DTYPE_BYTES, OFFLOAD_FROM_BYTES, OFFLOAD_RESIDENT
from ultrascale.description.recomputed import BlockRecompute
from ultrascale.plan.memory.block_walk import BlockWalk, Nothing, Tape, Unwinding
from ultrascale.plan.memory.gradients import (
    Deferred,
    DeferredGradient,
    RecordedBlock,
    StageGradients,
    WaitingBlock,
    waiting_bytes,
    waiting_gradient,
    weight_gradient_workspace,
)
from ultrascale.plan.memory.ledger import Allocation, Effect, Ledger
from ultrascale.plan.memory.sharding import Bucket, BucketSnapshot, Shards, WholeState, stays_whole
from ultrascale.plan.memory.stage_work import StagePart, StageWork
from ultrascale.plan.memory.tally import Counts, Tally
from ultrascale.plan.split_backward import gathered_input_bytes, is_deferrable, is_row_sum, reads_gathered, sent_in_half
from ultrascale.schedules.actions import Action, Kind
from ultrascale.work.op_builders import gathered_scratch_bytes
from ultrascale.work.recompute import (
    recompute_in_stack,
    recomputed_ops,
    regions_of,
    reruns_last,
    resent_ops,
    saved_results,
)
from ultrascale.work.sharding.places import Coordinates, even_part
from ultrascale.work.work import Op, input_gather, next_token_work, prediction_head_work, shared_work


@dataclass
class CheckpointedBlock:
    """A recomputed block: its inputs, and the results that selective recomputation keeps."""

    reads: dict[str, Allocation]
    shared: list[Allocation]
    """Inputs that all blocks read."""
    kept: dict[str, Allocation]
    offloaded: list[Allocation] = field(default_factory=list)


BlockTape = Tape | CheckpointedBlock | RecordedBlock


class RepeatedBlock(NamedTuple):
    """A block that equals an earlier one of its stage."""

    key: Hashable
    """Everything that its passes depend on beside the state of the buckets `near`. Its input and its gradients have the labels
    of those of other blocks of the kind: a block's last operation is a sum with the residual stream."""
    near: list[Bucket]
    """Buckets that its passes read or change."""


class BlockRecord(NamedTuple):
    """Effect of a pass of a block on the ledger and the tally, its result, and the buckets' tensors afterwards."""

    effect: Effect
    counts: Counts
    result: tuple[str, str, int] | None
    """Category, label and bytes; None for W."""
    buckets: BucketSnapshot
    ops: tuple[Op, ...]
    """Kept alive so that their `id` is not reused."""


Result = TypeVar("Result", Allocation, None)
BlockRecords = dict[Hashable, BlockRecord | None]
"""Records by block, pass and state of the buckets around it; None: a pass that leaves more, and is replayed every time."""


@dataclass
class MicroBatchState:
    """Saved tensors of a micro-batch between its forward and backward pass."""

    tapes: list[BlockTape] = field(default_factory=list)
    shared: dict[str, Allocation] = field(default_factory=dict)


class StageReplay(BlockWalk):
    """One stage's passes on the ledger, with the state between them."""

    def __init__(
        self, ledger: Ledger, tally: Tally, model: Model, part: StagePart, coordinates: Coordinates, *, splits: bool = False,
        stack: Stack = STACKS["ultrascale"], records: BlockRecords | None = None,
    ):  # fmt: skip
        """`splits`: the schedule splits backward passes into I and W, so that linear layers are separate operations. `stack`:
        the trainer. `records`: those of the rank's other stages."""
        layout, shape, self.stack = tally.layout, tally.shape, stack
        self.model, self.layout, self.shape, self.part = model, layout, shape, part
        self.splits = splits
        work = self.work = StageWork(model, layout, shape, part, coordinates)
        self.is_ours = stack.name == "ultrascale"
        shards = (WholeState if stays_whole(stack, layout) else Shards)(
            ledger,
            tally,
            work.buckets,
            coordinates,
            over_gloo=shape.device == "cpu",
            has_experts=model.num_experts > 0,
            stack=stack,
        )
        super().__init__(ledger, tally, shards, work.hidden_bytes)
        self.gradients = StageGradients(ledger, work, shards, DTYPE_BYTES[layout.precision])
        self.in_flight: dict[int, MicroBatchState] = {}
        self.waiting: dict[int, list[Deferred]] = {}
        self._now = MicroBatchState()
        positions = even_part(shape.local_length, layout.tp, coordinates.tp)[1]
        self._sequence_shard_bytes = self.hidden_bytes * positions // shape.local_length
        self._shares: dict[str, Allocation] = {}
        self._joined_gradients: list[Allocation] = []
        self._halves: dict[int, tuple[Op, Op]] = {}
        self._leaving: list[list[Allocation]] = []
        """Tensors of each block that are on their way to the host."""
        self._records = {} if records is None else records
        plain = ledger.keeps_timeline or layout.offload_activations
        self._repeated = {} if plain else self._repeated_blocks()

    def _repeated_blocks(self) -> dict[int, RepeatedBlock]:
        """Blocks that equal an earlier one of the stage, by number."""
        blocks, buckets, repeated, seen = self.work, self.shards.buckets, {}, set[Hashable]()
        for layer in self.part.layers:
            ops = blocks.block(layer)
            kind = id(ops), self.layout.block_recompute(layer)
            if kind in seen:
                read = [bucket for bucket in (blocks.bucket(layer), blocks.experts(layer, ops)[0]) if bucket is not None]
                places = sorted({place for bucket in read for place in (buckets.index(bucket) - 1, buckets.index(bucket))})
                near = [buckets[place] for place in places]
                sizes = tuple(
                    (bucket.label, bucket.ranks, self.shards.sizes[bucket], tuple(weight.numel for weight in bucket.weights))
                    for bucket in near
                )
                key = kind, blocks.is_first(layer), blocks.is_last(layer), 0 in places, sizes
                repeated[layer] = RepeatedBlock(key, near)
            seen.add(kind)
        return repeated

    def state(self) -> tuple[Hashable, ...]:
        """State that the next pass depends on: the buckets, and gradients that have not reached them."""
        return self.shards.state(), self._state_of_gradients()

    @contextmanager
    def without_counting(self) -> Iterator[None]:
        """Context for passes whose bytes and messages are counted already: they gather nothing and discard their weight
        gradients."""
        shards, gradients = self.shards, self.gradients
        self.shards = cast(Shards, Nothing())
        self.gradients = StageGradients(self.ledger, self.work, self.shards, gradients.itemsize)
        try:
            with self.ledger.unrecorded(), self.tally.unrecorded():
                yield
        finally:
            self.shards, self.gradients = shards, gradients

    def forward(self, micro_batch: int, stage_input: Allocation | None = None) -> Allocation | None:
        """Forward pass (F). `stage_input`: result of the stage before, released by the caller. Returns the stage's result."""
        model, shape = self.model, self.shape
        now = self._now = self.in_flight[micro_batch] = MicroBatchState()
        self.shards.before_forward(self.shards.root)
        live: dict[str, Allocation] = {} if stage_input is None else {"hidden": stage_input.retain()}
        now.tapes.append(self._run(self.work.before(), live, "activations", {"hidden"}))
        hidden = live.pop("hidden")
        ops = shared_work(model, shape, tuple(self.part.blocks))  # held by the operations that read it in the backward pass
        self._run(ops, now.shared, "activations", {result.name for op in ops for result in op.makes})
        for layer in self.part.layers:
            hidden = self._forward_block(layer, hidden)
        if self.part.is_last:
            self._forward_end(hidden)
        self.ledger.release_all(now.shared.values())
        self.shards.end_forward()
        return None if self.part.is_last else hidden

    def backward(self, action: Action, gradient: Allocation | None = None) -> Allocation | None:
        """Backward pass (B or I) of the micro-batch of `action`. `gradient`: of the stage's result, None on the last stage; the
        caller releases it. Returns the gradient of the stage's input."""
        shards = self.shards
        self._now = self.in_flight.pop(action.micro_batch)
        deferred: list[Deferred] | None = [] if action.kind is Kind.INPUT_GRADIENT else None
        if action.reduce_gradients:
            shards.complete_pending()
        if self.part.layers and not self.part.is_last:  # its last block made the stage's result: that hook comes first
            shards.before_backward(self.work.bucket(self.part.layers[-1]))
        shards.before_backward(shards.root)
        if self.part.is_last:
            hidden = self._backward_end(action, deferred)
        else:
            assert gradient is not None
            hidden = gradient.retain()
        for layer in reversed(self.part.layers):
            hidden = self._backward_block(layer, hidden, action, deferred).pop("hidden")
        gradients = {"hidden": hidden}
        self._unwind(self._pop_tape(), gradients, None, deferred)
        shards.after_backward(shards.root, action)
        shards.end_backward()
        if deferred is not None:
            self.waiting[action.micro_batch] = deferred
        return gradients.pop("hidden", None)

    def weight_gradients(self, action: Action) -> None:
        """Weight-gradient pass (W): the gradients that I deferred for the micro-batch of `action`."""
        self._weight_gradients(self.waiting.pop(action.micro_batch))
        for bucket in reversed(self.shards.buckets):
            if action.reduce_gradients:
                self.shards.complete_gradients(bucket)
            self.shards.after_backward(bucket, action)
        self.shards.end_backward()

    def _weight_gradients(self, deferred: Sequence[Deferred]) -> None:
        """Compute deferred gradients, in order."""
        whole: tuple[Allocation, Allocation] | None = None  # the tensor gathered last: its source and result
        for gradient in deferred:
            if isinstance(gradient, WaitingBlock) or whole is None or whole[0] is not gradient.source:
                self.ledger.release_all([] if whole is None else [whole[1]])
                whole = None
            if isinstance(gradient, WaitingBlock):
                self._weight_gradients_of_block(gradient)
                continue
            if whole is None and gradient.gathered_bytes:
                whole = gradient.source, self._gather_for_weight_gradient(gradient)
            self.ledger.touch("temporary", "scratch", gradient.scratch_bytes)
            if not self.shards.adds_in_place(*self.work.by_name[gradient.name]):
                self.gradients.arrive(gradient.name, self.gradients.make(gradient.name))
            self.ledger.release_all(gradient.allocations)
        self.ledger.release_all([] if whole is None else [whole[1]])

    def _weight_gradients_of_block(self, block: WaitingBlock) -> None:
        key = self._record_key(block.layer, None, "weights")
        if block.recorded is not None:
            if record := self._records.get(key):
                self._apply(block.layer, record)
                return
            now, self._now = self._now, MicroBatchState()
            with self.without_counting():
                self._replay_forward(block.layer, block.recorded.block_input)
                self._replay_backward(block.layer, block.gradient, block.action, block.deferred)
            self._now = now
        self._record(key, block.layer, partial(self._weight_gradients, block.deferred))

    def _gather_for_weight_gradient(self, deferred: DeferredGradient) -> Allocation:
        """All-gather a deferred GEMM's input or gradient over tp, for W."""
        self.tally.send("all_gather", self.layout.group("tp"), deferred.gathered_bytes)
        return self.ledger.take("temporary", "gathered for gradients of weights", deferred.gathered_bytes)

    # Forward

    def _forward_end(self, hidden: Allocation) -> None:
        """Forward pass of the head and of multi-token prediction; each prediction block reads the final norm's result, or that
        of the prediction block before."""
        model, shape, tapes = self.model, self.shape, self._now.tapes
        (norm, *head), live = self.work.after(), {"hidden": hidden}
        tapes.append(self._run((norm,), live, "activations", {"final"}))
        source = live["final"].retain()
        tapes.append(self._run(tuple(head), live, "activations", {"loss"}))
        self.ledger.release_all(live.values())
        for layer in self.part.predictions:
            live = {}
            tapes.append(self._run(next_token_work(model, shape), live, "activations", {"coming"}))
            hidden = self._forward_block(layer, source, live["coming"])
            source = hidden.retain()
            self.shards.before_forward(self.work.norm_bucket(layer))
            live = {"hidden": hidden}
            tapes.append(self._run(prediction_head_work(model, shape), live, "activations", {"loss"}, layer=layer))
            self.ledger.release_all(live.values())
        self.ledger.release(source)

    def _backward_end(self, action: Action, deferred: list[Deferred] | None) -> Allocation:
        """Backward pass of multi-token prediction, last first, then of the head. Returns the last block's output gradient."""
        source: dict[str, Allocation] = {}
        for layer in reversed(self.part.predictions):
            bucket = self.work.norm_bucket(layer)
            self.shards.before_backward(bucket)
            gradients = {"loss": self.ledger.take("temporary", "loss", 0), **source}
            self._unwind(self._pop_tape(), gradients, layer, deferred)
            self.shards.after_backward(bucket, action)
            gradients = self._backward_block(layer, gradients.pop("hidden"), action, deferred)
            source = {"hidden": gradients.pop("hidden")}
            self._unwind(self._pop_tape(), gradients, None, deferred)
        gradients = {"loss": self.ledger.take("temporary", "loss", 0)}
        if source:
            gradients["final"] = source["hidden"]
        self._unwind(self._pop_tape(), gradients, None, deferred)
        self._unwind(self._pop_tape(), gradients, None, deferred)
        return gradients.pop("hidden")

    def _forward_block(self, layer: int, hidden: Allocation, coming: Allocation | None = None) -> Allocation:
        key = self._record_key(layer, hidden)
        if key is None:
            return self._replay_forward(layer, hidden, coming)
        record = self._records.get(key)
        if record is None and not isinstance(self.shards, Nothing):
            return self._record(key, layer, partial(self._replay_forward, layer, hidden))
        self._now.tapes.append(RecordedBlock(hidden))
        return replace(hidden) if record is None else self._apply(layer, record)

    def _record_key(self, layer: int, tensor: Allocation | None, *of_pass: Hashable) -> Hashable:
        """Key of a block's pass that reads `tensor`; None if it is replayed every time. `of_pass`: nothing for F, "weights" for
        W, for B and I whether it is I, and the marks of the action."""
        if layer not in self._repeated or (tensor is not None and tensor.holders > 1):
            return None
        block = self._repeated[layer]
        read = None if tensor is None else (tensor.category, tensor.label)
        return block.key, of_pass, read, self.shards.state(block.near), self._state_of_gradients()

    def _state_of_gradients(self) -> Hashable:
        return self.gradients.state(), len(self._shares), len(self._joined_gradients)

    def _record(self, key: Hashable, layer: int, run: Callable[[], Result]) -> Result:
        """Replay a pass of a block, and record it unless its key has an entry."""
        if key in self._records:
            return run()
        near, counted = self._repeated[layer].near, self.tally.counted()
        before, others = self.shards.state(near), self._state_of_gradients()
        with self.ledger.recording() as effect:
            result = run()
        snapshot = self.shards.snapshot(before, near)
        if snapshot is None or others != self._state_of_gradients() or (result is not None and result.holders > 1):
            self._records[key] = None
        else:
            made = None if result is None else (result.category, result.label, result.num_bytes)
            self._records[key] = BlockRecord(effect, self.tally.since(counted), made, snapshot, self.work.block(layer))
        return result

    def _apply(self, layer: int, record: BlockRecord) -> Allocation:
        """Apply a record. Returns the pass's result; for W, which has none, nothing of no bytes."""
        self.ledger.apply(record.effect)
        self.tally.add(record.counts)
        self.shards.restore(record.buckets, self._repeated[layer].near)
        return Allocation(*(record.result or ("", "", 0)))

    def _replay_forward(self, layer: int, hidden: Allocation, coming: Allocation | None = None) -> Allocation:
        bucket = self.work.bucket(layer)
        if self.work.is_first(layer):
            self.shards.before_forward(bucket)
        ops = self.work.block(layer)
        leaves, block_input, more = {"hidden_out"}, hidden, {} if coming is None else {"coming": coming}
        live = {"hidden": hidden.retain(), **more}  # the caller holds it until the end
        recomputation = self._recomputation_of(layer)
        if recomputation is not None and not recomputation.modules:
            shared = {name for op in ops for name in op.saves} & self._now.shared.keys()
            reads = {name: allocation.retain() for name, allocation in live.items()}
            if recomputation.whole and self.work.cuts_input(layer):
                self.ledger.release(reads["hidden"])
                reads["hidden"] = self.ledger.take("activations", "residual", self._sequence_shard_bytes)
            checkpoint = CheckpointedBlock(reads, [self._now.shared[name].retain() for name in sorted(shared)], {})
            keep = None if recomputation.whole else checkpoint.kept
            kept_names = saved_results(ops, recomputation, self.stack.selective)
            self._run(ops, live, "activations", leaves, layer=layer, saves=False, keep=keep, kept_names=kept_names)
            self._now.tapes.append(checkpoint)
        else:
            recomputed = regions_of(ops, recomputation)
            self._now.tapes.append(self._run(ops, live, "activations", leaves, layer=layer, recomputed=recomputed))
        self.ledger.release(block_input)
        self._offload(layer, self._now.tapes[-1], block_input)
        if self.work.is_last(layer):
            self.shards.after_forward(bucket)
        return live.pop("hidden_out")

    def _offload(self, layer: int, tape: BlockTape, block_input: Allocation) -> None:
        """Start to offload a block's saved tensors, and free the earlier block's on the device
        (`parallel.activations.offload`). Tensors that all blocks read stay on the device."""
        blocks = self.part.blocks
        if not self.layout.offload_activations or (self.layout.pp == 1 and layer == blocks[-1]):
            return
        assert not isinstance(tape, RecordedBlock)
        is_checkpoint = isinstance(tape, CheckpointedBlock)
        saved = list(tape.reads.values()) if is_checkpoint else [allocation for _, some in tape.entries for allocation in some]
        stays = {id(tensor) for tensor in self._now.shared.values()}
        stays |= {id(block_input)} if layer == blocks[0] and not self.part.is_first else set()
        moving = {id(tensor): tensor for tensor in saved if id(tensor) not in stays and tensor.num_bytes >= OFFLOAD_FROM_BYTES}
        tape.offloaded = list(moving.values())
        for allocation in tape.offloaded:
            self.ledger.copy_to_host(allocation)
        self._leaving.append(tape.offloaded)
        while len(self._leaving) >= OFFLOAD_RESIDENT:
            for allocation in self._leaving.pop(0):
                self.ledger.leave_device(allocation)

    def _prefetch(self, *tapes: BlockTape) -> None:
        """Bring the blocks' saved tensors back to the device, and cancel offloads still in progress."""
        for tape in tapes:
            if isinstance(tape, RecordedBlock):  # nothing is offloaded where records are applied
                continue
            for allocation in tape.offloaded:
                self.ledger.bring_back(allocation)
            self._leaving = [offloaded for offloaded in self._leaving if offloaded is not tape.offloaded]

    def _recomputation_of(self, layer: int) -> BlockRecompute | None:
        """Operations that block `layer` recomputes."""
        return recompute_in_stack(self.stack, self.layout.block_recompute(layer), self.model, layer, self.layout)

    def _pop_tape(self) -> Tape:
        tape = self._now.tapes.pop()
        assert isinstance(tape, Tape)
        return tape

    def _backward_block(
        self, layer: int, gradient: Allocation, action: Action, deferred: list[Deferred] | None
    ) -> dict[str, Allocation]:
        """Backward pass of a block. Returns the gradients of its inputs, by name."""
        marks = action.reduce_gradients, action.sum_replicas, action.keep_parameters
        key, tape = self._record_key(layer, gradient, deferred is not None, *marks), self._now.tapes[-1]
        block = WaitingBlock(layer, action, gradient)
        if isinstance(tape, RecordedBlock):
            self._now.tapes.pop()
            record = None if key is None else self._records.get(key)
            if record or (key is not None and deferred is not None and isinstance(self.shards, Nothing)):
                block.recorded = tape
                if deferred is not None:
                    deferred.append(block)
                return {"hidden": self._apply(layer, record) if record else replace(gradient)}
            with self.without_counting():
                self._replay_forward(layer, tape.block_input)
        if key is None:
            return self._replay_backward(layer, gradient, action, deferred)
        if deferred is not None:
            deferred.append(block)
        run = partial(self._replay_backward, layer, gradient, action, None if deferred is None else block.deferred)
        return {"hidden": self._record(key, layer, lambda: run()["hidden"])}

    def _replay_backward(
        self, layer: int, gradient: Allocation, action: Action, deferred: list[Deferred] | None
    ) -> dict[str, Allocation]:
        bucket = self.work.bucket(layer)
        if self.work.is_last(layer):
            self.shards.before_backward(bucket)
        tape = self._now.tapes.pop()
        assert not isinstance(tape, RecordedBlock)
        self._prefetch(tape, *self._now.tapes[-1:])
        gradients = {"hidden_out": gradient}
        if isinstance(tape, CheckpointedBlock):
            remade = self._recompute(layer, tape)
            self._unwind(remade, gradients, layer, deferred, action)
            self.ledger.release_all([*tape.reads.values(), *tape.shared, *tape.kept.values()])
        else:
            self._unwind(tape, gradients, layer, deferred, action)
        if self.work.is_first(layer):
            self.shards.after_backward(bucket, action)
        return gradients

    def _recompute(self, layer: int, checkpoint: CheckpointedBlock) -> Tape:
        """Recompute a block up to, not including, the last operation that saves a tensor: torch stops there."""
        ops = self.work.block(layer)
        kept = None if self.layout.is_fully_recomputed(layer) else checkpoint.kept
        live = {name: allocation.retain() for name, allocation in checkpoint.reads.items()}
        if self.layout.is_fully_recomputed(layer) and self.work.cuts_input(layer):
            self.ledger.release(live["hidden"])
            live["hidden"] = self.ledger.take("temporary", "gathered block inputs", self.hidden_bytes)
            self.tally.send("all_gather", self.layout.group("tp"), input_gather(self.model, self.shape).num_bytes)
        self._count_recomputation(layer, ops)
        return self._rerun(ops, live, kept, layer)

    def _experts(self, layer: int | None, ops: Sequence[Op]) -> tuple[Bucket | None, int, int]:
        return self.work.experts(layer, ops)

    def _shared(self) -> dict[str, Allocation]:
        return self._now.shared

    def _backward_op(self, op: Op, saved: list[Allocation], arriving: Allocation, now: Unwinding) -> None:
        ledger, deferred = self.ledger, now.deferred
        names = self.work.names(op.weights, now.layer) if op.weights else []
        joined = self.is_ours and reads_gathered(op) and not op.in_fp8  # one autograd node with the others of its input
        separate = [name for name in op.reads if not (joined and name in now.gradients)]  # the others are added in place
        leaving = self._input_gradients(op, separate, saved, arriving, now.sizes)
        scratch = op.backward_scratch_bytes
        self.tally.backward(op if deferred is None else self._of_input(op))
        if deferred is not None and is_row_sum(op):
            self._shares[op.reads[0]] = arriving.retain()
        share = self._shares.pop(op.makes[0].name, None) if self._shares else None
        if deferred is not None and is_deferrable(op) and op.weights:
            saved_input = saved[0].retain() if saved else ledger.take("temporary", "made again", 0)
            grad = waiting_gradient(ledger, op, self.shape, share, arriving)
            of_input, of_gradient = gathered_input_bytes(op, self.shape), waiting_bytes(op, self.shape, arriving)
            gathered_bytes, source = (of_input, saved_input) if share is None else (of_gradient, grad)
            item = DeferredGradient(
                names[0], (grad, saved_input), source, gathered_bytes, weight_gradient_workspace(op, self.shape)
            )
            places = enumerate(deferred) if gathered_bytes else ()
            alike = [place for place, other in places if isinstance(other, DeferredGradient) and other.source is source]
            deferred.insert(alike[0] if alike else len(deferred), item)  # GEMMs of one input stay in forward order
            names, share, scratch = names[1:], None, 0  # only the bias gradient is computed now
        if op.hands_on_saved:
            new = [(name, saved[1].retain()) for name in names[:1]]
        else:
            names = [name for name in names if not self.shards.fuses(self.work.by_name[name][0])]
            new = [(name, self.gradients.make(name)) for name in names]
        if joined:  # the node holds all incoming gradients until their sum is computed
            self._joined_gradients.append(arriving.retain())
            scratch += gathered_scratch_bytes(self.shape, scratch) + self.hidden_bytes
        ledger.touch("temporary", "scratch", scratch)
        if op.kind == "gather":
            self.ledger.release_all(self._joined_gradients)
            self._joined_gradients.clear()
        self.ledger.release_all([arriving, *saved, *([] if share is None else [share])])
        for name, gradient in new:
            self.gradients.arrive(name, gradient)
        self._merge(now.gradients, leaving)

    def _count_recomputation(self, layer: int, ops: tuple[Op, ...]) -> None:
        """Count the FLOPs and messages of a block's recomputation."""
        recomputation, behind = self._recomputation_of(layer), reruns_last(ops, tp=self.layout.tp, splits=self.splits)
        for op in recomputed_ops(recomputation, ops, reruns_last=behind):
            self.tally.recompute(op)
        for op in resent_ops(recomputation, ops):
            self.tally.resend(op)

    def _of_input(self, op: Op) -> Op:
        """`op` with only the messages that I sends."""
        if not op.collectives:
            return op
        if id(op) not in self._halves:
            self._halves[id(op)] = op, replace(op, collectives=sent_in_half(op, "input", self.shape))
        return self._halves[id(op)][1]
