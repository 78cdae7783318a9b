"""What one rank holds, moment by moment: the actions of a step replayed over the table of work.

    F     every operation takes its result; what autograd saves stays, the rest goes after its last reader
    B     backwards: take the gradients of what an operation read and of its weights, let go of what it saved
    step  the optimizer updates in place; gradients are forgotten

A formula that adds up parts misses what decides: at the peak some activations are already gone and some gradients not yet
there. The replay follows `models.decoder`, autograd's order of release, `parallel.recompute` and FSDP2 (`plan.sharding`), and
costs a millisecond a layer at most. Not in it: what kernels take for themselves, fragmentation, the CUDA context and NCCL;
`plan.fit` leaves room for those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ultrascale.plan.ledger import Held, Ledger, Moment
from ultrascale.plan.sharding import Bucket, Shards
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Action, Kind
from ultrascale.spec.layout import DTYPE_BYTES, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.weights import Weight, layer_weights, weights_outside_layers
from ultrascale.spec.work import Op, Shape, block_work, embedding_work, head_work, shared_work

MAX_REPLAYED = 3
"""Micro-batches replayed: the first, one of those between (they are equal), and the last."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank (rank 0, which holds the largest shards), in bytes."""

    peak: Moment
    """The highest moment of any step."""
    peak_by_step: dict[int, Moment]
    """Step 0 differs from the later ones only if the optimizer's state is made by the first update."""
    between_steps: Moment
    """Parameters and optimizer state, when nothing runs."""
    saved_by_layer: tuple[dict[str, int], ...]
    """What each block keeps for the backward pass of one micro-batch, by kind of operation."""
    timeline: list[tuple[int, str, dict[str, int]]]
    num_micro_batches: int

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak, by category."""
        return self.peak.by_category


def is_replayed(model: Model, layout: Layout) -> bool:
    """Whether `plan_memory` knows all that `layout` does to `model`: data parallelism, ZeRO and recomputation of dense models.

    `plan.footprint` knows the rest.
    """
    one_rank = layout.tp == layout.cp == layout.pp == layout.ep == 1
    plain = not (model.num_experts or model.latent_attention or model.num_nextn_predict_layers)
    return one_rank and plain and not (layout.offload_activations or layout.offload_optimizer or layout.precision == "fp8")


def plan_memory(
    model: Model,
    layout: Layout,
    *,
    sequence_length: int,
    sequences_per_batch: int,
    documents: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
    optimizer_state_exists: bool = True,
    steps: int = 1,
    keeps_timeline: bool = False,
) -> MemoryPlan:
    """Replay `steps` training steps of one rank.

    `documents`: packed documents with masks. `optimizer_state_exists`: moments are there before the first step (as our trainer
    makes them), not made by the first update.
    Raises SpecError if the batch cannot be cut into micro-batches.
    """
    count = num_micro_batches(layout, sequences_per_batch)
    shape = Shape(layout.micro_batch_size, sequence_length, layout.precision, documents, device)
    ledger = Ledger(keeps_timeline=keeps_timeline)
    replay = _Replay(ledger, model, layout, shape)
    ledger.take("other", "batch", count * shape.num_tokens * 8 * (4 if documents else 2))
    moments = 2 * sum(replay.shards.shard_elements(b) for b in replay.shards.buckets) * replay.shards.master_itemsize
    between = ledger.now()
    for step in range(steps):
        if step == 0 and optimizer_state_exists:
            ledger.take("optimizer", "moments", moments)
        # The actions of a step with a million micro-batches are a million copies of the middle one's.
        for action in accumulate(min(count, MAX_REPLAYED), layout.zero_stage):
            ledger.mark("forward" if action.kind is Kind.FORWARD else "backward", step)
            replay.play(action)
        ledger.mark("optimizer", step)
        if step == 0 and not optimizer_state_exists:
            ledger.take("optimizer", "moments", moments)
        replay.shards.forget_gradients()
        between = ledger.now()
    ledger.mark("end", steps - 1)
    peaks = {step: peak for step, peak in ledger.peaks.items() if step < steps}
    return MemoryPlan(
        peak=max(peaks.values(), key=lambda moment: moment.total),
        peak_by_step=peaks,
        between_steps=between,
        saved_by_layer=tuple(_saved_by_kind(model, layout, shape, layer) for layer in range(model.num_hidden_layers)),
        timeline=ledger.timeline,
        num_micro_batches=count,
    )


def num_micro_batches(layout: Layout, sequences_per_batch: int) -> int:
    """Forward passes of one rank in a step. Raises SpecError if the batch does not divide."""
    together = layout.dp * layout.micro_batch_size
    if sequences_per_batch < together or sequences_per_batch % together:
        near = max(together, round(sequences_per_batch / together) * together)
        raise SpecError([
            Problem(
                "batch.sequences_per_batch",
                f"must be a multiple of dp x micro_batch_size = {layout.dp} x {layout.micro_batch_size} = {together}, "
                f"is {sequences_per_batch}",
                f"The nearest is {near}; or change layout.dp or layout.micro_batch_size.",
            )
        ])  # fmt: skip
    return sequences_per_batch // together


@dataclass
class _Tape:
    """What autograd remembers of operations of one pass: each with the bytes it saved."""

    entries: list[tuple[Op, list[Held]]] = field(default_factory=list)


@dataclass
class _Checkpoint:
    """A block that is computed again: its input, and what selective recomputation keeps."""

    block_input: Held
    kept: dict[str, Held]


class _Replay:
    """The state of a rank between operations."""

    def __init__(self, ledger: Ledger, model: Model, layout: Layout, shape: Shape):
        self.ledger, self.model, self.layout, self.shape = ledger, model, layout, shape
        outside = list(weights_outside_layers(model))
        by_layer = [list(layer_weights(model, layer)) for layer in range(model.num_hidden_layers)]
        self.by_name: dict[str, tuple[Bucket, Weight]] = {}
        buckets = [Bucket(outside, "outside the blocks")]
        self.per_bucket = layout.layers_per_bucket if layout.dp > 1 else 1
        for first in range(0, model.num_hidden_layers, self.per_bucket):
            members = by_layer[first : first + self.per_bucket]
            buckets.append(Bucket([w for ws in members for w in ws], "blocks"))
        for bucket in buckets:
            self.by_name |= {weight.name: (bucket, weight) for weight in bucket.weights}
        self.shards = Shards(ledger, layout, buckets, over_gloo=shape.device == "cpu")
        self.uses = Counter(name for op in (*embedding_work(model, shape), *head_work(model, shape)) for name in op.weights)
        self.pending: dict[str, Held] = {}
        self.tapes: list[_Tape | _Checkpoint] = []
        self.shared: dict[str, Held] = {}

    def play(self, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self.forward()
        else:
            self.backward(action)

    # Forward

    def forward(self) -> None:
        model, shape = self.model, self.shape
        self.shards.before_forward(self.shards.buckets[0])
        made: dict[str, Held] = {}
        self.tapes = [self._run(embedding_work(model, shape), made, "activations", {"hidden"})]
        hidden = made.pop("hidden")
        self.shared.clear()
        ops = shared_work(model, shape)
        self._run(ops, self.shared, "activations", {result.name for op in ops for result in op.makes})
        for layer in range(model.num_hidden_layers):
            hidden = self._forward_block(layer, hidden)
        made = {"hidden": hidden}
        self.tapes.append(self._run(head_work(model, shape), made, "activations", {"loss"}))
        self._drop_all(made.values())
        self.shards.end_forward()

    def _forward_block(self, layer: int, hidden: Held) -> Held:
        bucket = self._bucket(layer)
        if self._is_first(layer):
            self.shards.before_forward(bucket)
        ops = block_work(self.model, layer, self.shape)
        made, leaves = {"hidden": hidden}, {"hidden_out"}
        if self.layout.recompute == "selective" or self.layout.recomputes(layer):
            checkpoint = _Checkpoint(hidden.hold(), {})
            keep = checkpoint.kept if self.layout.recompute == "selective" else None
            self._run(ops, made, "activations", leaves, saves=False, keep=keep)
            self.tapes.append(checkpoint)
        else:
            self.tapes.append(self._run(ops, made, "activations", leaves))
        if self._is_last(layer):
            self.shards.after_forward(bucket)
        return made.pop("hidden_out")

    def _run(
        self,
        ops: tuple[Op, ...],
        made: dict[str, Held],
        category: str,
        leaves: set[str],
        *,
        saves: bool = True,
        keep: dict[str, Held] | None = None,
        kept: dict[str, Held] | None = None,
    ) -> _Tape:
        """Run operations forward. `made` are the activations there are; after its last reader each goes, except `leaves`.

        `keep` collects results that selective recomputation keeps; `kept` are those of the first run, used again.
        """
        tape = _Tape()
        last_reader = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.saves)}
        for index, op in enumerate(ops):
            for result in op.makes:
                if kept is not None and result.name in kept:
                    made[result.name] = kept.pop(result.name)
                else:
                    made[result.name] = self.ledger.take(category, op.kind, result.num_bytes)
                if keep is not None and op.kept_by_selective:
                    keep[result.name] = made[result.name].hold()
            self.ledger.touch(category, "scratch", op.scratch_bytes)
            if saves:
                tape.entries.append((op, self._save(op, made)))
            for name in [n for n in made if n not in leaves and last_reader.get(n, -1) <= index]:
                self.ledger.drop(made.pop(name))
        return tape

    def _save(self, op: Op, made: dict[str, Held]) -> list[Held]:
        return [(made if name in made else self.shared)[name].hold() for name in op.saves]

    # Backward

    def backward(self, action: Action) -> None:
        root, ledger = self.shards.buckets[0], self.ledger
        self.shards.before_backward(root)
        gradients = {"loss": ledger.take("temporary", "loss", 0)}
        self._unwind(self.tapes.pop(), gradients, None)
        gradient = gradients.pop("hidden")
        for layer in reversed(range(self.model.num_hidden_layers)):
            gradient = self._backward_block(layer, gradient, action)
        self._unwind(self.tapes.pop(), {"hidden": gradient}, None)
        self._drop_all(self.shared.values())
        self.shards.after_backward(root, action)
        self.shards.end_backward()

    def _backward_block(self, layer: int, gradient: Held, action: Action) -> Held:
        bucket = self._bucket(layer)
        if self._is_last(layer):
            self.shards.before_backward(bucket)
        tape = self.tapes.pop()
        gradients = {"hidden_out": gradient}
        if isinstance(tape, _Checkpoint):
            again = self._recompute(layer, tape)
            self._unwind(again, gradients, layer)
            self._drop_all([tape.block_input, *tape.kept.values()])
        else:
            self._unwind(tape, gradients, layer)
        if self._is_first(layer):
            self.shards.after_backward(bucket, action)
        return gradients.pop("hidden")

    def _recompute(self, layer: int, checkpoint: _Checkpoint) -> _Tape:
        """Run a block again up to the last operation that saves something: torch stops there, before computing it."""
        ops = block_work(self.model, layer, self.shape)
        last = max(index for index, op in enumerate(ops) if op.saves)
        kept = checkpoint.kept if self.layout.recompute == "selective" else None
        made = {"hidden": checkpoint.block_input.hold()}
        tape = self._run(ops[:last], made, "temporary", set(ops[last].saves), kept=kept)
        tape.entries += [(ops[last], self._save(ops[last], made)), *((op, []) for op in ops[last + 1 :])]
        self._drop_all(made.values())
        return tape

    def _unwind(self, tape: _Tape | _Checkpoint, gradients: dict[str, Held], layer: int | None) -> None:
        """Run the backward pass of the operations on a tape, last first. `gradients` of results in, of what was read out."""
        assert isinstance(tape, _Tape)
        sizes = {a.name: a.num_bytes for op, _ in tape.entries for a in op.makes}
        sizes["hidden"] = self.shape.num_tokens * self.model.hidden_size * self.shape.itemsize
        for op, saved in reversed(tape.entries):
            if not op.makes[0].has_gradient:
                self._drop_all(saved)
                continue
            arriving = gradients.pop(op.makes[0].name)
            if op.hands_on_saved:
                leaving = {op.reads[0]: saved[0].hold()}
            elif op.passes_gradient:
                leaving = {name: arriving.hold() for name in op.reads}
            else:
                leaving = {name: self.ledger.take("temporary", "gradients of activations", sizes[name]) for name in op.reads}
            if op.hands_on_saved:
                new = [(op.weights[0], saved[1].hold())]
            else:
                new = [(name, self._weight_gradient(name, layer)) for name in op.weights]
            self.ledger.touch("temporary", "scratch", op.backward_scratch_bytes)
            self._drop_all([arriving, *saved])
            for name, gradient in new:
                self._arrive(name if layer is None else f"layers.{layer}.{name}", gradient)
            for name, gradient in leaving.items():
                if name in gradients:  # autograd adds to the one that is there
                    self.ledger.drop(gradient)
                else:
                    gradients[name] = gradient

    def _weight_gradient(self, name: str, layer: int | None) -> Held:
        _, weight = self.by_name[name if layer is None else f"layers.{layer}.{name}"]
        return self.ledger.take("temporary", "gradients of weights", weight.numel * DTYPE_BYTES[self.layout.precision])

    def _arrive(self, name: str, gradient: Held) -> None:
        """A gradient reaches its weight; a tied one waits for its other half first."""
        if name in self.pending:
            self.ledger.drop(gradient)
            gradient = self.pending.pop(name)
        elif self.uses[name] > 1:
            self.pending[name] = gradient
            return
        bucket, weight = self.by_name[name]
        self.shards.add_gradient(bucket, weight, gradient)

    def _bucket(self, layer: int) -> Bucket:
        return self.shards.buckets[1 + layer // self.per_bucket]

    def _is_first(self, layer: int) -> bool:
        return layer % self.per_bucket == 0

    def _is_last(self, layer: int) -> bool:
        return (layer + 1) % self.per_bucket == 0 or layer + 1 == self.model.num_hidden_layers

    def _drop_all(self, held: Iterable[Held]) -> None:
        for one in held:
            self.ledger.drop(one)


def _saved_by_kind(model: Model, layout: Layout, shape: Shape, layer: int) -> dict[str, int]:
    """Bytes a block holds between its forward and its backward pass, by the kind of operation that made them."""
    ops = block_work(model, layer, shape)
    made = {a.name: (op, a.num_bytes) for op in ops for a in op.makes}
    saved = {name for op in ops for name in op.saves if name in made}
    block_input = {"residual": shape.num_tokens * model.hidden_size * shape.itemsize}
    if layout.recomputes(layer):
        return block_input
    if layout.recompute == "selective":
        saved = {a.name for op in ops if op.kept_by_selective for a in op.makes}
    by_kind: Counter[str] = Counter(block_input)
    for name in saved:
        op, num_bytes = made[name]
        by_kind[op.kind if name != "hidden_mid" else "residual"] += num_bytes
    return dict(by_kind)
