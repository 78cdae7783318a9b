"""One stage of the model on one rank, its forward and backward passes replayed over the table of work; `plan.memory.replay`
drives it.

    F     every operation takes its result; what autograd saves stays, the rest goes after its last reader
    B     backwards: take the gradients of what an operation read and of its weights, let go of what it saved
    I     the same, but linear layers keep their input and the gradient of their result; where tp cuts the sequence this rank's
          positions of what is gathered
    W     make their weights' gradients of those, gathered once more

The stage is the whole model where there is no pipeline. FSDP2's part is `plan.memory.sharding`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import DTYPE_BYTES
from ultrascale.description.recomputed import Again
from ultrascale.plan.cut_backward import gathered_input_bytes, is_row_sum, may_wait, reads_gathered, sent_in_half
from ultrascale.plan.memory.gradients import (
    Waits,
    WaitsLeft,
    WeightGradients,
    waiting_bytes,
    waiting_gradient,
    waiting_room,
    waits_left,
)
from ultrascale.plan.memory.ledger import Effect, Held, Ledger
from ultrascale.plan.memory.offload_replay import Checkpoint, OffloadReplay, Tape, Waiting
from ultrascale.plan.memory.sharding import BucketsLeft, Shards, WholeState, stays_whole
from ultrascale.plan.memory.stage_work import Part, StageWork
from ultrascale.plan.memory.tally import Counts, Tally
from ultrascale.schedules.actions import Action, Kind
from ultrascale.work.kept import (
    Region,
    adds_bias_apart,
    again_in,
    computed_again,
    kept_results,
    regions,
    sent_again,
    stops_behind,
)
from ultrascale.work.op_builders import gathered_room
from ultrascale.work.sharding.places import Coordinates, even_part
from ultrascale.work.work import Op, coming_work, input_gather, prediction_head_work, shared_work


@dataclass
class Under:
    """State of a micro-batch between its forward and its backward pass."""

    tapes: list[Tape | Checkpoint | Booked] = field(default_factory=list)
    shared: dict[str, Held] = field(default_factory=dict)


class Booked(NamedTuple):
    """A block whose forward pass is only in the books: category, label and bytes of what it read."""

    given: tuple[str, str, int]
    trip: tuple[Held, ...] = ()


class BlockEntry(NamedTuple):
    """One pass of a block: its effect on the ledger and the tally, what it makes, and what its buckets have after it."""

    effect: Effect
    counts: Counts
    result: tuple[str, str, int]
    leaves: BucketsLeft
    waiting: WaitsLeft | None
    """Gradients and inputs that I leaves for W."""


BlockEntries = dict[Hashable, BlockEntry]


class Untouched:
    """In the place of `Shards`: whatever it is told, nothing happens."""

    root = None
    buckets = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class StageReplay:
    """The state of a stage between operations."""

    def __init__(
        self, ledger: Ledger, tally: Tally, model: Model, part: Part, at: Coordinates, *, splits: bool = False,
        stack: Stack = STACKS["ultrascale"], entries: BlockEntries | None = None,
    ):  # fmt: skip
        """`splits`: whether the schedule cuts backward passes in two, which makes products operations of their own. `stack`:
        the trainer. `entries`: passes of blocks that other stages of the same layout have written down."""
        layout, shape, self.stack = tally.layout, tally.shape, stack
        self.ledger, self.tally, self.model, self.layout, self.shape, self.part = ledger, tally, model, layout, shape, part
        self.splits = splits
        work = self.work = StageWork(model, layout, shape, part, at)
        self.is_ours = stack.name == "ultrascale"
        self.shards = (WholeState if stays_whole(stack, layout) else Shards)(
            ledger, tally, work.buckets, at, over_gloo=shape.device == "cpu", has_experts=model.num_experts > 0, stack=stack
        )
        self._sizes = self.shards.sizes
        self.gradients = WeightGradients(ledger, work, self.shards, DTYPE_BYTES[layout.precision])
        self.under_way: dict[int, Under] = {}
        self.waiting: dict[int, list[Waits]] = {}
        self._now = Under()
        positions = even_part(shape.local_length, layout.tp, at.tp)[1]
        self._own_part_bytes = self.work.hidden_bytes * positions // shape.local_length
        self._shares: dict[str, Held] = {}
        self._together: list[Held] = []
        self._halves: dict[int, tuple[Op, Op]] = {}
        self._known_drops: dict[Hashable, tuple[Any, list[list[str]]]] = {}
        self._known_again: dict[int, Again | None] = {}
        self._known_near: dict[int, tuple[Any, ...]] = {}
        self._known_last: dict[int, tuple[tuple[Op, ...], int, tuple[Op, ...]]] = {}
        self._offload = OffloadReplay(ledger, layout, part.blocks, part.is_first)
        plain = ledger.keeps_timeline or layout.offload_activations or work.per_bucket > 1
        first = {(id(work.block(layer)), layout.again(layer)): layer for layer in reversed(part.layers)}
        self._inner = frozenset[int]() if plain else frozenset(part.layers[:-1]) - {*first.values()}
        self._entries: BlockEntries = {} if entries is None else entries
        self._results: dict[Hashable, tuple[tuple[str, str, int], WaitsLeft | None]] = {}
        """Result of a forward pass, or of I with what that leaves, by kind of block and the bytes that it reads."""

    def state(self) -> tuple[Hashable, ...]:
        """State that the bytes of the next pass depend on: buckets as they are, and gradients under way to them."""
        return self.shards.state(), self.gradients.state(), len(self._shares), len(self._together)

    @contextmanager
    def buckets_left_alone(self) -> Iterator[None]:
        """Passes inside gather nothing, and their gradients go nowhere."""
        shards, gradients = self.shards, self.gradients
        self.shards = cast(Shards, Untouched())
        self.gradients = WeightGradients(self.ledger, self.work, self.shards, gradients.itemsize)
        try:
            yield
        finally:
            self.shards, self.gradients = shards, gradients

    def forward(self, micro_batch: int, given: Held | None = None) -> Held | None:
        """F. `given`: what the stage before made, which stays its owner's. Returns what the next stage takes."""
        model, shape = self.model, self.shape
        now = self._now = self.under_way[micro_batch] = Under()
        self.shards.before_forward(self.shards.root)
        made: dict[str, Held] = {} if given is None else {"hidden": given.hold()}
        now.tapes.append(self._run(self.work.before(), made, "activations", {"hidden"}))
        hidden = made.pop("hidden")
        ops = shared_work(model, shape, tuple(self.part.blocks))  # held by whoever reads it on the way back
        self._run(ops, now.shared, "activations", {result.name for op in ops for result in op.makes})
        for layer in self.part.layers:
            hidden = self._pass_block(layer, hidden, None, None)
        if self.part.is_last:
            self._forward_end(hidden)
        self.ledger.drop_all(now.shared.values())
        self.shards.end_forward()
        return None if self.part.is_last else hidden

    def backward(self, action: Action, gradient: Held | None = None) -> Held | None:
        """B, or I: the micro-batch of `action`, from the gradient of its result, which stays its owner's, or from the loss, to
        the gradient of its input."""
        shards = self.shards
        self._now = self.under_way.pop(action.micro_batch)
        waits: list[Waits] | None = [] if action.kind is Kind.INPUT_GRADIENT else None
        if action.reduce_gradients:
            shards.complete_some()
        if self.part.layers and not self.part.is_last:  # its last block made what the stage hands on: that hook comes first
            shards.before_backward(self.work.bucket(self.part.layers[-1]))
        shards.before_backward(shards.root)
        if self.part.is_last:
            hidden = self._backward_end(action, waits)
        else:
            assert gradient is not None
            hidden = gradient.hold()
        for layer in reversed(self.part.layers):
            hidden = self._pass_block(layer, hidden, action, waits)
        gradients = {"hidden": hidden}
        self._unwind(self._pop_tape(), gradients, None, waits)
        shards.after_backward(shards.root, action)
        shards.end_backward()
        if waits is not None:
            self.waiting[action.micro_batch] = waits
        return gradients.pop("hidden", None)

    def weight_gradients(self, action: Action) -> None:
        """W: what I left of the micro-batch of `action`."""
        whole: tuple[Held, Held] | None = None  # what was gathered last, and of what
        for waits in self.waiting.pop(action.micro_batch):
            if whole is None or whole[0] is not waits.source:
                self.ledger.drop_all([] if whole is None else [whole[1]])
                whole = (waits.source, self._gather_again(waits)) if waits.gathered_bytes else None
            self.ledger.touch("temporary", "scratch", waits.room_bytes)
            if not self.shards.adds_in_place(*self.work.by_name[waits.name]):
                self.gradients.arrive(waits.name, self.gradients.make(waits.name))
            self.ledger.drop_all(waits.held)
        self.ledger.drop_all([] if whole is None else [whole[1]])
        for bucket in reversed(self.shards.buckets):
            if action.reduce_gradients:
                self.shards.complete_gradients(bucket)
            self.shards.after_backward(bucket, action)
        self.shards.end_backward()

    def _gather_again(self, waits: Waits) -> Held:
        """Over tp, for W."""
        self.tally.send("all_gather", self.layout.group("tp"), waits.gathered_bytes)
        return self.ledger.take("temporary", "gathered for gradients of weights", waits.gathered_bytes)

    def _pass_block(self, layer: int, given: Held, action: Action | None, waits: list[Waits] | None) -> Held:
        """Forward, or with an `action` backward. Between the first block of a kind, which holds what all of it share, and the
        last, passes are replayed once in each state, then booked."""

        def replay() -> Held:
            if action is None:
                return self._forward_block(layer, given)
            return self._backward_block(layer, given, action, waits).pop("hidden")

        if layer not in self._inner:
            return replay()
        tapes, told = self._now.tapes, (given.category, given.label, given.num_bytes)
        tape, is_off = None if action is None else tapes[-1], self.shards.root is None
        near, sizes, *kind = self._known_near.get(layer) or self._learn_near(layer)
        kind = *kind, told, waits is not None and given.holders
        if is_off:
            known = self._results.get(kind) if action is None or waits is not None else None
            if known is not None and not isinstance(tape, Tape | Checkpoint):
                return self._booked(layer, given, action, waits, *known)
            if isinstance(tape, Booked):
                tapes[-1] = self._make_tape(layer, tape)
            return replay()
        ledger, tally, shards = self.ledger, self.tally, self.shards
        before = shards.state(near)
        key = (
            action and action._replace(stage=0, micro_batch=0, beside=None), kind, given.holders, before, sizes,
            self.gradients.state(), len(self._shares), len(self._together),
        )  # fmt: skip
        entry = self._entries.get(key)
        if entry is None or isinstance(tape, Tape | Checkpoint):  # which may hold some of what all share
            if isinstance(tape, Booked):
                tapes[-1] = self._make_tape(layer, tape)
            counted, holders, waited = tally.counted(), given.holders, len(waits or ())
            with ledger.recording() as recorded:
                result = replay()
            made = result.category, result.label, result.num_bytes
            waiting = None if waits is None else waits_left(waits[waited:], layer, given, holders)
            if waiting is None and waits is not None:
                return result
            if action is None or waits is not None:
                self._results[kind] = made, waiting
            if result.holders == 1 and (left := shards.left(before, near)) is not None:
                self._entries[key] = BlockEntry(recorded.effect(), tally.since(counted), made, left, waiting)
            return result
        ledger.apply(entry.effect)
        tally.add(entry.counts)
        shards.put_back(entry.leaves, near)
        if action is None or waits is not None:
            self._results[kind] = entry.result, entry.waiting
        return self._booked(layer, given, action, waits, entry.result, entry.waiting)

    def _learn_near(self, layer: int) -> tuple[Any, ...]:
        """The buckets around a block, their sizes, and what blocks that are alike have alike."""
        near = self.work.around(layer)
        sizes = tuple(self._sizes[one] for one in near)
        found = self._known_near[layer] = near, sizes, id(self.work.block(layer)), self.layout.again(layer)
        return found

    def _booked(
        self, layer: int, given: Held, action: Action | None, waits: list[Waits] | None, result: tuple[str, str, int],
        waiting: WaitsLeft | None,
    ) -> Held:  # fmt: skip
        """A pass of a block that the books have already."""
        if action is None:
            self._now.tapes.append(Booked((given.category, given.label, given.num_bytes)))
        else:
            self._now.tapes.pop()
        if waits is not None and waiting is not None:
            waits += waiting.of(layer, given)
        return Held(*result)

    def _make_tape(self, layer: int, booked: Booked) -> Tape | Checkpoint | Booked:
        """Leave what a booked forward pass would have left; the ledger has its bytes already."""
        with self.ledger.off_the_books(), self.tally.off_the_books(), self.buckets_left_alone():
            self.ledger.drop(self._forward_block(layer, Held(*booked.given)))
        return self._now.tapes.pop()

    # Forward

    def _forward_end(self, hidden: Held) -> None:
        """The head, and what predicts tokens further on: each from what the last norm, or the block before, made."""
        model, shape, tapes = self.model, self.shape, self._now.tapes
        (norm, *head), made = self.work.after(), {"hidden": hidden}
        tapes.append(self._run((norm,), made, "activations", {"final"}))
        source = made["final"].hold()
        tapes.append(self._run(tuple(head), made, "activations", {"loss"}))
        self.ledger.drop_all(made.values())
        for layer in self.part.predictions:
            made = {}
            tapes.append(self._run(coming_work(model, shape), made, "activations", {"coming"}))
            hidden = self._forward_block(layer, source, made["coming"])
            source = hidden.hold()
            self.shards.before_forward(self.work.norm_bucket(layer))
            made = {"hidden": hidden}
            tapes.append(self._run(prediction_head_work(model, shape), made, "activations", {"loss"}, layer=layer))
            self.ledger.drop_all(made.values())
        self.ledger.drop(source)

    def _backward_end(self, action: Action, waits: list[Waits] | None) -> Held:
        """The gradient of what the last block made. What was done last comes first."""
        source: dict[str, Held] = {}
        for layer in reversed(self.part.predictions):
            bucket = self.work.norm_bucket(layer)
            self.shards.before_backward(bucket)
            gradients = {"loss": self.ledger.take("temporary", "loss", 0), **source}
            self._unwind(self._pop_tape(), gradients, layer, waits)
            self.shards.after_backward(bucket, action)
            gradients = self._backward_block(layer, gradients.pop("hidden"), action, waits)
            source = {"hidden": gradients.pop("hidden")}
            self._unwind(self._pop_tape(), gradients, None, waits)
        gradients = {"loss": self.ledger.take("temporary", "loss", 0)}
        if source:
            gradients["final"] = source["hidden"]
        self._unwind(self._pop_tape(), gradients, None, waits)
        self._unwind(self._pop_tape(), gradients, None, waits)
        return gradients.pop("hidden")

    def _forward_block(self, layer: int, hidden: Held, coming: Held | None = None) -> Held:
        bucket = self.work.bucket(layer)
        if self.work.is_first(layer):
            self.shards.before_forward(bucket)
        ops = self.work.block(layer)
        leaves, block_input, more = {"hidden_out"}, hidden, {} if coming is None else {"coming": coming}
        made = {"hidden": hidden.hold(), **more}  # whoever calls holds it until the end
        again = self._again(layer)
        if again is not None and not again.modules:
            shared = {name for op in ops for name in op.saves} & self._now.shared.keys()
            reads = {name: held.hold() for name, held in made.items()}
            if again.whole and self.work.cuts_input(layer):
                self.ledger.drop(reads["hidden"])
                reads["hidden"] = self.ledger.take("activations", "residual", self._own_part_bytes)
            checkpoint = Checkpoint(reads, [self._now.shared[name].hold() for name in sorted(shared)], {})
            keep = None if again.whole else checkpoint.kept
            kept_names = kept_results(ops, again, self.stack.selective)
            self._run(ops, made, "activations", leaves, layer=layer, saves=False, keep=keep, kept_names=kept_names)
            self._now.tapes.append(checkpoint)
        else:
            some = () if again is None else regions(ops, again.modules, as_megatron=again.as_megatron)
            self._now.tapes.append(self._run(ops, made, "activations", leaves, layer=layer, some=some))
        self.ledger.drop(block_input)
        tape = self._now.tapes[-1]
        assert not isinstance(tape, Booked)
        self._offload.send_down(layer, tape, block_input, self._now.shared.values())
        if self.work.is_last(layer):
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
        kept_names: Collection[str] = (),
        some: Sequence[Region] = (),
        is_again: bool = False,
    ) -> Tape:
        """Run operations forward. `made`: activations that there are; after its last reader each goes, except `leaves`. `keep`
        collects results that selective recomputation keeps; `kept` are those of the first run, used again. `some`: what they
        make is not saved, and what they read is kept. `is_again`: in a backward pass, where FSDP2 lets go of nothing, and
        whoever calls counts what is done."""
        tape = Tape()
        drops = self._drops(ops, some, tuple(made), frozenset(leaves))
        for region in some:
            tape.remade |= dict.fromkeys(region.drops, Waiting(region))
        ends = {region.end: region for region in some}
        there = set() if kept is None else {name for op in ops if op.reads and op.makes[0].name in kept for name in op.reads}
        experts, first, last = self.work.experts(layer, ops)
        for index, op in enumerate(ops):
            if not is_again:
                self.tally.forward(op)
            if experts is not None and index == first:
                self.shards.before_forward(experts)
            keeps = keep if keep is not None and op.makes[0].name in kept_names else None
            apart = (kept is not None or keeps is not None) and adds_bias_apart(op)
            for result in op.makes:
                if kept is not None and result.name in kept and not apart:
                    made[result.name] = kept.pop(result.name)
                else:  # of a sum that is kept nobody makes the parts again
                    num_bytes = 0 if result.name in there and op.makes_partial_sums else result.num_bytes
                    made[result.name] = self.ledger.take(category, op.kind, num_bytes)
                if kept is not None and result.name in kept:  # without its bias, which is added again
                    self.ledger.drop(kept.pop(result.name))
                if keeps is not None and not apart:
                    keeps[result.name] = made[result.name].hold()
            if op.kind == "attention" and (parts := self.tally.hop_parts(op)):
                if keeps is not None:  # results of single hops are kept, and merged again
                    keeps[f"{op.name} parts"] = self.ledger.take(category, op.kind, parts)
                elif kept is not None and f"{op.name} parts" in kept:
                    self.ledger.drop(kept.pop(f"{op.name} parts"))
            self.ledger.touch(category, "scratch", op.scratch_bytes)
            if keeps is not None and apart:
                keeps[op.makes[0].name] = self.ledger.take(category, op.kind, op.makes[0].num_bytes)
            if saves:
                tape.entries.append((op, self._save(op, made, tape.remade) if op.saves else []))
            if (region := ends.get(op.name)) is not None:
                reads = {name: made[name].hold() for name in region.reads if name in made and name not in tape.remade}
                tape.remade[next(iter(region.drops))].reads |= reads
            for name in drops[index]:
                self.ledger.drop(made.pop(name))
            if experts is not None and index == last:
                if is_again:  # recomputation enters FSDP2 here, which takes them for the root
                    self.shards.end_forward()
                else:
                    self.shards.after_forward(experts)
        return tape

    def _again(self, layer: int) -> Again | None:
        """Operations that block `layer` recomputes."""
        if layer not in self._known_again:
            self._known_again[layer] = again_in(self.stack, self.layout.again(layer), self.model, layer, self.layout)
        return self._known_again[layer]

    def _drops(
        self, ops: tuple[Op, ...], some: Sequence[Region], given: tuple[str, ...], leaves: frozenset[str]
    ) -> list[list[str]]:
        """By operation, what goes when it is done: of what was `given` or made, without `leaves`, what nobody reads later."""
        key = id(ops), id(some), given, leaves
        if key not in self._known_drops:
            last_reader, there = self._last_readers(ops, some), dict.fromkeys(given)
            found = list[list[str]]()
            for index, op in enumerate(ops):
                there |= dict.fromkeys(one.name for one in op.makes)
                found.append([name for name in there if name not in leaves and last_reader.get(name, -1) <= index])
                for name in found[-1]:
                    del there[name]
            self._known_drops[key] = (ops, some), found
        return self._known_drops[key][1]

    def _last_readers(self, ops: tuple[Op, ...], some: Sequence[Region]) -> dict[str, int]:
        """By name of what is read the last operation that does."""
        found = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.saves, *op.holds)}
        places = {op.name: index for index, op in enumerate(ops)}
        for region in some:
            end = places[region.end]
            found |= {name: max(end, found.get(name, 0)) for name in region.reads}
            found |= {name: min(end, found.get(name, end)) for name in region.hidden}  # its variables end with it
        return found

    def _last_saving(self, ops: tuple[Op, ...]) -> tuple[int, tuple[Op, ...]]:
        """The last operation that saves something, and all before it."""
        if id(ops) not in self._known_last:
            last = max(index for index, op in enumerate(ops) if op.saves)
            self._known_last[id(ops)] = ops, last, ops[:last]
        return self._known_last[id(ops)][1:]

    def _save(self, op: Op, made: dict[str, Held], remade: Collection[str] = ()) -> list[Held]:
        shared = self._now.shared  # a mask that a block's last operation makes is not there, where that is not run again
        there = [made.get(name) or shared.get(name) for name in op.saves if name not in remade]
        return [held.hold() for held in there if held is not None]

    def _pop_tape(self) -> Tape:
        tape = self._now.tapes.pop()
        assert isinstance(tape, Tape)
        return tape

    def _backward_block(self, layer: int, gradient: Held, action: Action, waits: list[Waits] | None) -> dict[str, Held]:
        """The gradients of what it reads."""
        bucket = self.work.bucket(layer)
        if self.work.is_last(layer):
            self.shards.before_backward(bucket)
        tape = self._now.tapes.pop()
        assert not isinstance(tape, Booked)
        self._offload.bring_up(tape, *(one for one in self._now.tapes[-1:] if not isinstance(one, Booked)))
        gradients = {"hidden_out": gradient}
        if isinstance(tape, Checkpoint):
            again = self._recompute(layer, tape)
            self._unwind(again, gradients, layer, waits, action)
            self.ledger.drop_all([*tape.reads.values(), *tape.shared, *tape.kept.values()])
        else:
            self._unwind(tape, gradients, layer, waits, action)
        if self.work.is_first(layer):
            self.shards.after_backward(bucket, action)
        return gradients

    def _recompute(self, layer: int, checkpoint: Checkpoint) -> Tape:
        """Run a block again up to the last operation that saves something: torch stops there, before computing it."""
        ops = self.work.block(layer)
        last, before = self._last_saving(ops)
        kept = None if self.layout.recomputes(layer) else checkpoint.kept
        made = {name: held.hold() for name, held in checkpoint.reads.items()}
        if self.layout.recomputes(layer) and self.work.cuts_input(layer):
            self.ledger.drop(made["hidden"])
            made["hidden"] = self.ledger.take("temporary", "gathered block inputs", self.work.hidden_bytes)
            self.tally.send("all_gather", self.layout.group("tp"), input_gather(self.model, self.shape).num_bytes)
        tape = self._run(before, made, "temporary", set(ops[last].saves), layer=layer, kept=kept, is_again=True)
        self._count_again(layer, ops)
        tape.entries += [(ops[last], self._save(ops[last], made)), *((op, []) for op in ops[last + 1 :])]
        self.ledger.drop_all(made.values())
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
        sizes |= dict.fromkeys(("hidden", "final", "coming"), self.work.hidden_bytes)
        ops = tuple(op for op, _ in tape.entries)
        experts, first, last = self.work.experts(layer, ops)
        for index, (op, saved) in reversed(list(enumerate(tape.entries))):
            if tape.remade and layer is not None and any(one.name in gradients for one in op.makes):
                for name in op.saves:
                    if name in tape.remade:
                        self._make_again(tape, index, tape.remade[name], layer)
            if experts is not None and index == last:
                self.shards.before_backward(experts)
            arrived = [gradients.pop(one.name) for one in op.makes if one.name in gradients]
            if not arrived:
                self.ledger.drop_all(saved)
                continue
            self._one_backward(op, saved, arrived[0], gradients, sizes, layer, waits)
            self.ledger.drop_all(arrived[1:])
            if experts is not None and index == first:
                assert action is not None
                self.shards.after_backward(experts, action)

    def _make_again(self, tape: Tape, index: int, waiting: Waiting, layer: int) -> None:
        """Run a region of a block again, for the operations of its tape up to `index` that save what it makes."""
        region = waiting.region
        for name in region.reads:
            if name in tape.remade:
                self._make_again(tape, index, tape.remade[name], layer)
        for name in region.drops:
            del tape.remade[name]
        made = {name: held.hold() for name, held in waiting.reads.items()}
        self._run(region.ops, made, "temporary", set(region.drops), layer=layer, saves=False, is_again=True)
        for op in region.ops:
            self.tally.compute_again(op)
            if op.collectives:
                self.tally.send_again(op)
        for op, saved in tape.entries[: index + 1]:
            saved += [made[name].hold() for name in op.saves if name in region.drops]
        for other in {id(one): one for one in tape.remade.values()}.values():  # they will read it
            other.reads |= {name: made[name].hold() for name in other.region.reads if name in region.drops}
        self.ledger.drop_all([*made.values(), *waiting.reads.values()])

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
        ledger, names = self.ledger, self.work.names(op.weights, layer) if op.weights else []
        joined = self.is_ours and reads_gathered(op) and not op.in_fp8  # with the others of its input one operation
        if op.hands_on_saved:
            leaving = {op.reads[0]: saved[0].hold()}
        elif op.passes_gradient:
            leaving = {name: arriving.hold() for name in op.reads}
        else:
            mine = [name for name in op.reads if not (joined and name in gradients)]  # else added in place
            leaving = {name: ledger.take("temporary", "gradients of activations", sizes[name]) for name in mine}
        scratch = op.backward_scratch_bytes
        self.tally.backward(op if waits is None else self._of_input(op))
        if waits is not None and is_row_sum(op):
            self._shares[op.reads[0]] = arriving.hold()
        share = self._shares.pop(op.makes[0].name, None) if self._shares else None
        if waits is not None and may_wait(op) and op.weights:
            given = saved[0].hold() if saved else ledger.take("temporary", "made again", 0)
            grad = waiting_gradient(ledger, op, self.shape, share, arriving)
            of_input, of_gradient = gathered_input_bytes(op, self.shape), waiting_bytes(op, self.shape, arriving)
            gathered_bytes, source = (of_input, given) if share is None else (of_gradient, grad)
            item = Waits(names[0], (grad, given), source, gathered_bytes, waiting_room(op, self.shape))
            alike = [number for number, other in enumerate(waits) if other.source is source] if gathered_bytes else []
            waits.insert(alike[0] if alike else len(waits), item)  # products of one input wait in their order
            names, share, scratch = names[1:], None, 0  # of its bias
        if op.hands_on_saved:
            new = [(name, saved[1].hold()) for name in names[:1]]
        else:
            names = [name for name in names if not self.shards.fuses(self.work.by_name[name][0])]
            new = [(name, self.gradients.make(name)) for name in names]
        if joined:  # holds all that arrived until its sum is there
            self._together.append(arriving.hold())
            scratch += gathered_room(self.shape, scratch) + self.work.hidden_bytes
        ledger.touch("temporary", "scratch", scratch)
        if op.kind == "gather":
            self.ledger.drop_all(self._together)
            self._together.clear()
        self.ledger.drop_all([arriving, *saved, *([] if share is None else [share])])
        for name, gradient in new:
            self.gradients.arrive(name, gradient)
        for name, gradient in leaving.items():
            gradients[name] = self._added(gradients[name], gradient) if name in gradients else gradient

    def _count_again(self, layer: int, ops: tuple[Op, ...]) -> None:
        """Count the FLOPs and messages of a block's recomputation."""
        again, behind = self._again(layer), stops_behind(ops, tp=self.layout.tp, splits=self.splits)
        for op in computed_again(again, ops, stops_behind=behind):
            self.tally.compute_again(op)
        for op in sent_again(again, ops):
            self.tally.send_again(op)

    def _of_input(self, op: Op) -> Op:
        """`op` with the messages that I sends of it."""
        if not op.collectives:
            return op
        if id(op) not in self._halves:
            self._halves[id(op)] = op, replace(op, collectives=sent_in_half(op, "input", self.shape))
        return self._halves[id(op)][1]

    def _added(self, there: Held, gradient: Held) -> Held:
        """The sum: autograd adds to the one that is there, unless somebody else holds it too."""
        if there.holders > 1:
            total = self.ledger.take("temporary", "gradients of activations", there.num_bytes)
            self.ledger.drop(there)
            there = total
        self.ledger.drop(gradient)
        return there
