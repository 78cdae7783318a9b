"""One stage of the model on one rank, its forward and backward passes replayed over the table of work; `plan.memory` drives it.

    F     every operation takes its result; what autograd saves stays, the rest goes after its last reader
    B     backwards: take the gradients of what an operation read and of its weights, let go of what it saved
    I     the same, but linear layers keep their input and the gradient of their result; where tp cuts the sequence this rank's
          positions of what is gathered
    W     make their weights' gradients of those, gathered once more

The stage is the whole model where there is no pipeline. FSDP2's part is `plan.sharding`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ultrascale.plan.ledger import Held, Ledger
from ultrascale.plan.offload_replay import Checkpoint, OffloadReplay, Tape
from ultrascale.plan.sharding import Bucket, Shards
from ultrascale.schedules.actions import Action, Kind
from ultrascale.spec.layout import DTYPE_BYTES, Layout
from ultrascale.spec.model import Model
from ultrascale.spec.places import Coordinates, place
from ultrascale.spec.weights import Weight, layer_weights, weights_outside_layers
from ultrascale.spec.work import Op, Shape, block_work, embedding_work, head_work, shared_work

EXPERTS = "mlp.experts."
NEVER_WAIT = (EXPERTS, "mlp.router")
"""Products that are no linear layers: their weights' gradients are made in I (`parallel.pipeline_weights`)."""


class Part(NamedTuple):
    """Which of the model a stage holds."""

    layers: range
    is_first: bool = True
    is_last: bool = True


class Waits(NamedTuple):
    """A weight whose gradient W will make, with what it is made of."""

    name: str
    held: tuple[Held, ...]
    gathered_bytes: int
    """Of the other side of the product over all ranks of tp; 0 where it is whole here."""


@dataclass
class Under:
    """What a micro-batch leaves between its forward and its backward pass."""

    tapes: list[Tape | Checkpoint] = field(default_factory=list)
    shared: dict[str, Held] = field(default_factory=dict)


class StageReplay:
    """The state of a stage between operations."""

    def __init__(self, ledger: Ledger, model: Model, layout: Layout, shape: Shape, part: Part, at: Coordinates):
        self.ledger, self.model, self.layout, self.shape, self.part = ledger, model, layout, shape, part
        self.per_bucket = layout.layers_per_bucket if layout.dp * layout.cp > 1 else 1
        self.hidden_bytes = shape.outer_tokens * model.hidden_size * shape.itemsize
        self._local = {w.name: replace(w, shape=place(w, layout, at).shape) for w in self._weights()}
        buckets = self._buckets()
        self.by_name = {weight.name: (bucket, weight) for bucket in buckets for weight in bucket.weights}
        self.shards = Shards(ledger, layout, buckets, over_gloo=shape.device == "cpu", has_experts=model.num_experts > 0)
        before, after = self._before(), self._after()
        self.uses = Counter(name for op in (*before, *after) for name in op.weights)
        self.pending: dict[str, Held] = {}
        self.under_way: dict[int, Under] = {}
        self.waiting: dict[int, list[Waits]] = {}
        self._now = Under()
        self._shares: dict[str, Held] = {}
        self._offload = OffloadReplay(ledger, layout, part.layers, part.is_first)

    def forward(self, micro_batch: int, given: Held | None = None) -> Held | None:
        """F. `given`: what the stage before made, which stays its owner's. Returns what the next stage takes."""
        model, shape = self.model, self.shape
        now = self._now = self.under_way[micro_batch] = Under()
        self.shards.before_forward(self.shards.root)
        made: dict[str, Held] = {} if given is None else {"hidden": given.hold()}
        now.tapes.append(self._run(self._before(), made, "activations", {"hidden"}))
        hidden = made.pop("hidden")
        ops = shared_work(model, shape)
        self._run(ops, now.shared, "activations", {result.name for op in ops for result in op.makes})
        for layer in self.part.layers:
            hidden = self._forward_block(layer, hidden)
        if self.part.is_last:
            made = {"hidden": hidden}
            now.tapes.append(self._run(self._after(), made, "activations", {"loss"}))
            self._drop_all(made.values())
        self.shards.end_forward()
        return None if self.part.is_last else hidden

    def backward(self, action: Action, gradient: Held | None = None) -> Held | None:
        """B, or I: the micro-batch of `action`, from the gradient of its result, which stays its owner's, or from the loss.
        Returns the gradient of its input."""
        ledger, shards = self.ledger, self.shards
        now = self._now = self.under_way.pop(action.micro_batch)
        waits: list[Waits] | None = [] if action.kind is Kind.INPUT_GRADIENT else None
        shards.before_backward(shards.root)
        if self.part.is_last:
            gradients = {"loss": ledger.take("temporary", "loss", 0)}
            self._unwind(self._pop_tape(), gradients, None, waits)
            hidden = gradients.pop("hidden")
        else:
            assert gradient is not None
            hidden = gradient.hold()
        for layer in reversed(self.part.layers):
            hidden = self._backward_block(layer, hidden, action, waits)
        gradients = {"hidden": hidden}
        self._unwind(self._pop_tape(), gradients, None, waits)
        self._drop_all(now.shared.values())
        shards.after_backward(shards.root, action)
        shards.end_backward()
        if waits is not None:
            self.waiting[action.micro_batch] = waits
        return gradients.pop("hidden", None)

    def weight_gradients(self, action: Action) -> None:
        """W: what I left of the micro-batch of `action`."""
        for waits in self.waiting.pop(action.micro_batch):
            gathered = self.ledger.take("temporary", "gathered for gradients of weights", waits.gathered_bytes)
            if not self.shards.adds_in_place(*self.by_name[waits.name]):
                self._arrive(waits.name, self._weight_gradient(waits.name))
            self._drop_all([*waits.held, gathered])
        for bucket in reversed(self.shards.buckets):
            if action.reduce_gradients:
                self.shards.complete_gradients(bucket)
            self.shards.after_backward(bucket, action)
        self.shards.end_backward()

    # What the stage is

    def _weights(self) -> list[Weight]:
        """Of the whole model's, those of this stage."""
        part = self.part
        named = {name for op in (*self._before(), *self._after()) for name in op.weights}
        outside = [w for w in weights_outside_layers(self.model) if w.name in named]
        return [*outside, *(w for layer in part.layers for w in layer_weights(self.model, layer))]

    def _buckets(self) -> list[Bucket]:
        """In the order in which FSDP2 sees them end in a forward pass, what is outside the blocks first: experts that are cut
        over other ranks than the rest are buckets of their own, before the bucket of their block."""
        layout, local = self.layout, self._local
        root = Bucket([w for w in local.values() if w.layer is None], "outside the blocks")
        buckets = [root]
        apart = self.model.num_experts > 0 and layout.tp * layout.ep * layout.expert_tp > 1
        layers = list(self.part.layers)
        for first in range(0, len(layers), self.per_bucket):
            members = layers[first : first + self.per_bucket]
            for layer in members if apart else ():
                if experts := [w for w in local.values() if w.layer == layer and w.is_expert]:
                    buckets.append(Bucket(experts, "experts", ranks=layout.expert_shard_size))
            rest = [w for w in local.values() if w.layer in members and not (apart and w.is_expert)]
            buckets.append(Bucket(rest, "blocks"))
        return buckets

    def _before(self) -> tuple[Op, ...]:
        return embedding_work(self.model, self.shape) if self.part.is_first else ()

    def _after(self) -> tuple[Op, ...]:
        return head_work(self.model, self.shape) if self.part.is_last else ()

    # Forward

    def _forward_block(self, layer: int, hidden: Held) -> Held:
        bucket = self._bucket(layer)
        if self._is_first(layer):
            self.shards.before_forward(bucket)
        ops = block_work(self.model, layer, self.shape)
        made, leaves, block_input = {"hidden": hidden}, {"hidden_out"}, hidden
        again = self.layout.again(layer)
        if again is not None:
            checkpoint = Checkpoint(hidden.hold(), {})
            keep = None if again.whole else checkpoint.kept
            self._run(ops, made, "activations", leaves, layer=layer, saves=False, keep=keep, kinds=again.kinds)
            self._now.tapes.append(checkpoint)
        else:
            self._now.tapes.append(self._run(ops, made, "activations", leaves, layer=layer))
        self._offload.send_down(layer, self._now.tapes[-1], block_input, self._now.shared.values())
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
        layer: int | None = None,
        saves: bool = True,
        keep: dict[str, Held] | None = None,
        kept: dict[str, Held] | None = None,
        kinds: Collection[str] = (),
    ) -> Tape:
        """Run operations forward. `made` are the activations there are; after its last reader each goes, except `leaves`.

        `keep` collects results that selective recomputation keeps; `kept` are those of the first run, used again.
        """
        tape = Tape()
        last_reader = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.saves)}
        there = set() if kept is None else {name for op in ops if op.reads and op.makes[0].name in kept for name in op.reads}
        experts, first, last = self._experts(layer, ops)
        for index, op in enumerate(ops):
            if experts is not None and index == first:
                self.shards.before_forward(experts)
            for result in op.makes:
                if kept is not None and result.name in kept:
                    made[result.name] = kept.pop(result.name)
                else:  # of a sum that is kept nobody makes the parts again
                    num_bytes = 0 if op.makes_partial_sums and result.name in there else result.num_bytes
                    made[result.name] = self.ledger.take(category, op.kind, num_bytes)
                if keep is not None and op.kept(kinds):
                    keep[result.name] = made[result.name].hold()
            self.ledger.touch(category, "scratch", op.scratch_bytes)
            if saves:
                tape.entries.append((op, self._save(op, made)))
            for name in [n for n in made if n not in leaves and last_reader.get(n, -1) <= index]:
                self.ledger.drop(made.pop(name))
            if experts is not None and index == last:
                self.shards.after_forward(experts)
        return tape

    def _save(self, op: Op, made: dict[str, Held]) -> list[Held]:
        return [(made if name in made else self._now.shared)[name].hold() for name in op.saves]

    # Backward

    def _pop_tape(self) -> Tape:
        tape = self._now.tapes.pop()
        assert isinstance(tape, Tape)
        return tape

    def _backward_block(self, layer: int, gradient: Held, action: Action, waits: list[Waits] | None) -> Held:
        bucket = self._bucket(layer)
        if self._is_last(layer):
            self.shards.before_backward(bucket)
        tape = self._now.tapes.pop()
        self._offload.bring_up(tape, *self._now.tapes[-1:])
        gradients = {"hidden_out": gradient}
        if isinstance(tape, Checkpoint):
            again = self._recompute(layer, tape)
            self._unwind(again, gradients, layer, waits, action)
            self._drop_all([tape.block_input, *tape.kept.values()])
        else:
            self._unwind(tape, gradients, layer, waits, action)
        if self._is_first(layer):
            self.shards.after_backward(bucket, action)
        return gradients.pop("hidden")

    def _recompute(self, layer: int, checkpoint: Checkpoint) -> Tape:
        """Run a block again up to the last operation that saves something: torch stops there, before computing it."""
        ops = block_work(self.model, layer, self.shape)
        last = max(index for index, op in enumerate(ops) if op.saves)
        kept = None if self.layout.recomputes(layer) else checkpoint.kept
        made = {"hidden": checkpoint.block_input.hold()}
        tape = self._run(ops[:last], made, "temporary", set(ops[last].saves), layer=layer, kept=kept)
        tape.entries += [(ops[last], self._save(ops[last], made)), *((op, []) for op in ops[last + 1 :])]
        self._drop_all(made.values())
        return tape

    def _unwind(
        self,
        tape: Tape,
        gradients: dict[str, Held],
        layer: int | None,
        waits: list[Waits] | None,
        action: Action | None = None,
    ) -> None:
        """Run the backward pass of the operations on a tape, last first. `gradients` of results in, of what was read out."""
        sizes = {a.name: a.num_bytes for op, _ in tape.entries for a in op.makes}
        sizes["hidden"] = self.hidden_bytes
        ops = tuple(op for op, _ in tape.entries)
        experts, first, last = self._experts(layer, ops)
        for index, (op, saved) in reversed(list(enumerate(tape.entries))):
            if experts is not None and index == last:
                self.shards.before_backward(experts)
            arriving = gradients.pop(op.makes[0].name, None)
            if arriving is None:
                self._drop_all(saved)
                continue
            self._one_backward(op, saved, arriving, gradients, sizes, layer, waits)
            if experts is not None and index == first:
                assert action is not None
                self.shards.after_backward(experts, action)

    def _one_backward(
        self,
        op: Op,
        saved: list[Held],
        arriving: Held,
        gradients: dict[str, Held],
        sizes: dict[str, int],
        layer: int | None,
        waits: list[Waits] | None,
    ) -> None:
        ledger, names = self.ledger, self._names(op.weights, layer)
        if op.hands_on_saved:
            leaving = {op.reads[0]: saved[0].hold()}
        elif op.passes_gradient:
            leaving = {name: arriving.hold() for name in op.reads}
        else:
            leaving = {name: ledger.take("temporary", "gradients of activations", sizes[name]) for name in op.reads}
        scratch = op.backward_scratch_bytes
        if waits is not None and _gathers_gradient(op):
            self._shares[op.reads[0]] = arriving.hold()
        share = self._shares.pop(op.makes[0].name, None)
        if waits is not None and _may_wait(op):
            gathered_bytes = scratch if share is None else arriving.num_bytes
            waits.append(Waits(names[0], (share or arriving.hold(), *(held.hold() for held in saved)), gathered_bytes))
            names, share, scratch = names[1:], None, 0  # of its bias
        new = [(names[0], saved[1].hold())] if op.hands_on_saved else [(name, self._weight_gradient(name)) for name in names]
        ledger.touch("temporary", "scratch", scratch)
        self._drop_all([arriving, *saved, *([] if share is None else [share])])
        for name, gradient in new:
            self._arrive(name, gradient)
        for name, gradient in leaving.items():
            gradients[name] = self._added(gradients[name], gradient) if name in gradients else gradient

    def _added(self, there: Held, gradient: Held) -> Held:
        """The sum: autograd adds to the one that is there, unless somebody else holds it too."""
        if there.holders > 1:
            total = self.ledger.take("temporary", "gradients of activations", there.num_bytes)
            self.ledger.drop(there)
            there = total
        self.ledger.drop(gradient)
        return there

    def _names(self, weights: Sequence[str], layer: int | None) -> list[str]:
        return [name if layer is None else f"layers.{layer}.{name}" for name in weights]

    def _weight_gradient(self, name: str) -> Held:
        _, weight = self.by_name[name]
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

    # Buckets

    def _bucket(self, layer: int) -> Bucket:
        return self.by_name[f"layers.{layer}.input_layernorm.weight"][0]

    def _experts(self, layer: int | None, ops: Sequence[Op]) -> tuple[Bucket | None, int, int]:
        """The bucket that a block's experts have for themselves, and the first and the last operation that read it."""
        if layer is None:
            return None, 0, 0
        at = [index for index, op in enumerate(ops) if op.name.startswith(EXPERTS)]
        named = [name for index in at for name in ops[index].weights]
        bucket = self.by_name[f"layers.{layer}.{named[0]}"][0] if named else None
        if bucket is None or bucket is self._bucket(layer):
            return None, 0, 0
        return bucket, at[0], at[-1]

    def _is_first(self, layer: int) -> bool:
        return (layer - self.part.layers.start) % self.per_bucket == 0

    def _is_last(self, layer: int) -> bool:
        return (layer + 1 - self.part.layers.start) % self.per_bucket == 0 or layer + 1 == self.part.layers.stop

    def _drop_all(self, held: Iterable[Held]) -> None:
        for one in held:
            self.ledger.drop(one)


def _may_wait(op: Op) -> bool:
    return op.kind == "matmul" and not op.name.startswith(NEVER_WAIT)


def _gathers_gradient(op: Op) -> bool:
    """From this rank's positions, for the row product before it."""
    return (
        any((one.kind, one.axis, one.when) == ("all_gather", "tp", "backward") for one in op.collectives)
        and op.kind == "exchange"
    )
