"""Passes of a pipeline stage, replayed once and then applied from a record: the same bytes in a fraction of the time.

Micro-batches repeat the same passes. The first pass of a kind in a given state is replayed operation by operation
(`plan.memory.stage_replay`), and its effect on the ledger is recorded, with the buckets' new state if it changed. Later passes
of that kind in that state apply the record. A pass in a new state is replayed; the tensors that its micro-batch's earlier,
applied passes would have left are made first, without counting them again. Inner stages with equal blocks share records, on
other ranks of the layout too. `tests/plan/test_stage_player.py` compares this with the plain replay, byte for byte.

`RankReplay` replays a pipeline rank: its list of actions on its stages, and the messages sent and received.

input     of a stage: memory of the received message, until its backward pass is done
result    handed to the mailbox; over gloo it lives until a later message shows that it has arrived
          (`parallel.pipeline.pipeline_messages`)
gradient  of a result: memory of a received message, until its backward pass is done
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ultrascale.plan.memory.ledger import Allocation, Effect, Ledger
from ultrascale.plan.memory.sharding import BucketSnapshot
from ultrascale.plan.memory.stage_replay import StageReplay
from ultrascale.plan.memory.tally import Counts, Tally
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.messages import Message, input_of, output_of, receive_order
from ultrascale.schedules.sharded import FINISHES


@dataclass(frozen=True)
class PassEntry:
    """Record of one pass: its effect on the ledger and the tally, and its result for a neighbouring stage."""

    effect: Effect
    counts: Counts
    result: tuple[str, str, int] | None
    """Category, label and bytes."""
    gradient_holders: int
    """Holders added to the incoming gradient: I keeps it for W."""
    input_holders: int
    """Holders added to the stage's input by F and I: a GEMM of W reads it if no norm comes first."""
    buckets_after: tuple[tuple[Hashable, ...], BucketSnapshot] | None
    """State after the pass, and the buckets' tensors then; None if unchanged."""


@dataclass
class Played:
    """A micro-batch whose passes were applied from records: the ledger counts its bytes, its tensors do not exist."""

    stage_input: Allocation | None
    gradient: Allocation | None = None
    input_gradient: Action | None = None
    """Action of its I, once applied too."""
    input_holders: int = 0


PassEntries = dict[Hashable, PassEntry | None]


RecordedPasses = dict[Hashable, PassEntries]
"""Records of the stages of one layout, by kind of stage (`alike`)."""


FORWARD = Kind.FORWARD.value


def alike(number: int, stages: Mapping[int, StageReplay]) -> Hashable:
    """Key that is equal for stages whose passes change the ledger alike: operations and recomputation of each block; for the
    first and last stage, their part. `stages`: all of the rank; between two of them no message is counted."""
    part, layout, work = stages[number].part, stages[number].layout, stages[number].work
    beside = number - 1 in stages, number + 1 in stages
    if part.is_first or part.is_last:
        return part, beside
    return tuple((id(work.block(layer)), layout.block_recompute(layer)) for layer in part.blocks), beside


@dataclass
class StagePlayer:
    """The passes F, B or I, and W of a `StageReplay`, from records where there are any."""

    stage: StageReplay
    _entries: PassEntries = field(default_factory=dict)
    """Records by key; None: a pass that leaves gradients in progress, or shares tensors, and is replayed every time."""
    _played: dict[int, Played] = field(default_factory=dict)
    _stage_inputs: dict[int, tuple[Allocation, int]] = field(default_factory=dict)
    """Input of each micro-batch, and its holders before its forward pass."""
    _state: tuple[Hashable, ...] | None = None

    def forward(self, micro_batch: int, stage_input: Allocation | None = None) -> Allocation | None:
        """Forward pass (F)."""
        key = FORWARD, self._now()
        if stage_input is not None:
            self._stage_inputs[micro_batch] = stage_input, stage_input.holders
        if (entry := self._entries.get(key)) is None:
            return self._replay(key, lambda: self.stage.forward(micro_batch, stage_input), None)
        self._played[micro_batch] = Played(stage_input)
        return self._play(entry, None)

    def backward(self, action: Action, gradient: Allocation | None = None) -> Allocation | None:
        """Backward pass: B, I, or the W of the first stage, which does its whole backward pass."""
        key, played = self._key(action), self._played.get(action.micro_batch)
        if played is None or (entry := self._entries.get(key)) is None:
            self._materialize(action.micro_batch)
            return self._replay(
                key, lambda: self.stage.backward(action, gradient), gradient, self._stage_inputs.get(action.micro_batch)
            )
        if action.kind is Kind.INPUT_GRADIENT:
            played.gradient, played.input_gradient, played.input_holders = gradient, action, entry.input_holders
            if played.stage_input is not None:
                played.stage_input.holders += entry.input_holders
        else:
            del self._played[action.micro_batch]
        return self._play(entry, gradient)

    def weight_gradients(self, action: Action) -> None:
        """Weight-gradient pass (W)."""
        key = self._key(action)
        if action.micro_batch not in self._played or (entry := self._entries.get(key)) is None:
            self._materialize(action.micro_batch)
            self._replay(key, lambda: self.stage.weight_gradients(action), None)
        else:
            del self._played[action.micro_batch]
            self._play(entry, None)

    def _key(self, action: Action) -> Hashable:
        return action.kind.value, action.reduce_gradients, action.sum_replicas, action.keep_parameters, self._now()

    def _now(self) -> tuple[Hashable, ...]:
        if self._state is None:
            self._state = self.stage.state()
        return self._state

    def _play(self, entry: PassEntry, gradient: Allocation | None) -> Allocation | None:
        self.stage.ledger.apply(entry.effect)
        self.stage.tally.add(entry.counts)
        if gradient is not None:
            gradient.holders += entry.gradient_holders
        if entry.buckets_after is not None:
            self._state, snapshot = entry.buckets_after
            self.stage.shards.restore(snapshot)
        return None if entry.result is None else Allocation(*entry.result)

    def _replay(
        self,
        key: Hashable,
        run: Callable[[], Allocation | None],
        gradient: Allocation | None,
        stage_input: tuple[Allocation, int] | None = None,
    ) -> Allocation | None:
        """Replay the pass, and record it unless its key has an entry."""
        ledger, tally, before = self.stage.ledger, self.stage.tally, self._now()
        self._state = None
        if key in self._entries:
            return run()
        holders, counted = 0 if gradient is None else gradient.holders, tally.counted()
        with ledger.recording() as recorded:
            result = run()
        result_fields = None if result is None else (result.category, result.label, result.num_bytes)
        keeps = 0 if gradient is None else gradient.holders - holders
        kept_input = 0 if stage_input is None else stage_input[0].holders - stage_input[1]
        now, changed = self._now(), None
        repeats = now[1:] == before[1:] and (result is None or result.holders == 1)
        if repeats and now != before:
            snapshot = self.stage.shards.snapshot(before[0])
            repeats, changed = snapshot is not None, snapshot and (now, snapshot)
        counts = tally.since(counted)
        self._entries[key] = PassEntry(recorded, counts, result_fields, keeps, kept_input, changed) if repeats else None
        return result

    def _materialize(self, micro_batch: int) -> None:
        """Make the tensors that a micro-batch's applied passes would have left. The ledger counts their bytes already."""
        played = self._played.pop(micro_batch, None)
        if played is None:
            return
        stage, stage_input, gradient = self.stage, played.stage_input, played.gradient
        with stage.without_counting():
            if played.input_gradient is None:
                self._release(stage.forward(micro_batch, stage_input))
                return
            for tensor, kept_holders in ((stage_input, played.input_holders), (gradient, 0)):  # released by their owners since
                if tensor is not None:
                    tensor.holders += 1 - kept_holders
            self._release(stage.forward(micro_batch, stage_input))
            kept = 0 if gradient is None else gradient.holders - 1
            if gradient is not None:
                gradient.holders = 1
            self._release(stage.backward(played.input_gradient, gradient))
            if gradient is not None:
                assert gradient.holders == 1 + kept, gradient
                gradient.holders = kept
            if stage_input is not None:
                stage_input.holders -= 1
                assert stage_input.holders == played.input_holders, stage_input

    def _release(self, result: Allocation | None) -> None:
        if result is not None:
            self.stage.ledger.release(result)


class MailReplay:
    """Pipeline messages of one rank in one step, and their memory."""

    def __init__(
        self, ledger: Ledger, tally: Tally, messages: Sequence[Message], rank: int, num_bytes: int, *, over_gloo: bool
    ):
        """`messages`: of the whole step and all ranks, `num_bytes` each."""
        self.ledger, self.tally, self.num_bytes, self.over_gloo = ledger, tally, num_bytes, over_gloo
        self.outgoing = {message.key: message for message in messages if message.sender == rank}
        self.incoming = {message.key: message for message in messages if message.receiver == rank}
        self._group = tally.layout.pp, tally.layout.group("pp")[1]
        self._expected = deque(receive_order(messages, rank))
        self._arriving: dict[tuple[bool, int, int], Allocation] = {}
        self._leaving: defaultdict[int, deque[tuple[Message, Allocation]]] = defaultdict(deque)

    def expect(self, position: int) -> None:
        """Allocate the messages whose receives are posted when the action at `position` begins."""
        while self._expected and self._expected[0][0] <= position:
            self._arriving[self._expected.popleft()[1].key] = self.ledger.take("activations", "messages", self.num_bytes)

    def take(self, message: Message) -> Allocation:
        """Return a received message, and free messages to its sender that it must have read before sending this one."""
        leaving = self._leaving[message.sender]
        while leaving and leaving[0][0].needed_by <= message.sent_by:
            self.ledger.release(leaving.popleft()[1])
        return self._arriving.pop(message.key)

    def send(self, message: Message, tensor: Allocation) -> None:
        """Send a tensor and release it: over gloo once its arrival is known, over NCCL at once (NCCL reports completion)."""
        self.tally.send("send", self._group, self.num_bytes)
        if self.over_gloo:
            self._leaving[message.receiver].append((message, tensor))
        else:
            self.ledger.release(tensor)

    def close(self) -> None:
        for leaving in self._leaving.values():
            for _, tensor in leaving:
                self.ledger.release(tensor)
            leaving.clear()


class RankReplay:
    """Replay of one step on a pipeline rank, with its micro-batches in flight."""

    def __init__(
        self, ledger: Ledger, stages: Mapping[int, StageReplay | StagePlayer], mail: MailReplay, last_stage: int,
        output_bytes: int,
    ):  # fmt: skip
        """`output_bytes`: logits of a micro-batch, kept to the end of the step."""
        self.ledger, self.stages, self.mail, self.last_stage = ledger, stages, mail, last_stage
        self.output_bytes, self._outputs = output_bytes, list[Allocation]()
        self._inputs: dict[tuple[int, int], Allocation] = {}
        self._deferred: dict[tuple[int, int], Allocation] = {}
        self._handed: dict[tuple[bool, int, int], Allocation] = {}

    def play(self, actions: Sequence[Action], step: int) -> None:
        """Replay all actions of the rank."""
        for position, action in enumerate(actions):
            self.mail.expect(position)
            for part in action.parts:
                received = self._take(part)
                self.ledger.mark("forward" if part.kind is Kind.FORWARD else "backward", step)
                self._do(part, received)
                if (
                    self.output_bytes and part.stage == self.last_stage and part.kind in FINISHES
                ):  # until then the loss holds them
                    self._outputs.append(self.ledger.take("activations", "outputs", self.output_bytes))
        self.ledger.release_all(self._outputs)
        self._outputs.clear()
        self.mail.close()

    def _take(self, part: Action) -> Allocation | None:
        key = input_of(part, self.last_stage)
        if key is None:
            return None
        message = self.mail.incoming.get(key)
        return self._handed.pop(key) if message is None else self.mail.take(message)

    def _do(self, part: Action, received: Allocation | None) -> None:
        stage, key = self.stages[part.stage], (part.stage, part.micro_batch)
        if part.kind is Kind.FORWARD:
            if received is not None:
                self._inputs[key] = received
            self._pass_on(part, stage.forward(part.micro_batch, received))
        elif part.kind is Kind.INPUT_GRADIENT and part.stage == 0:  # no stage needs its input gradient: W does all
            if received is not None:
                self._deferred[key] = received
        elif part.kind is Kind.WEIGHT_GRADIENT and part.stage > 0:
            stage.weight_gradients(part)
        else:
            received = self._deferred.pop(key, None) if part.kind is Kind.WEIGHT_GRADIENT else received
            result = stage.backward(part, received)
            for tensor in (received, self._inputs.pop(key, None)):
                if tensor is not None:
                    self.ledger.release(tensor)
            self._pass_on(part, result)

    def _pass_on(self, part: Action, result: Allocation | None) -> None:
        key = output_of(part, self.last_stage)
        if result is None or key is None:
            return
        message = self.mail.outgoing.get(key)
        if message is None:
            self._handed[key] = result
        else:
            self.mail.send(message, result)
