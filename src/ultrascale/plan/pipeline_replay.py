"""A rank of a pipeline replayed: its list of actions on its stages, and the messages that come and go beside them.

input     of a stage: memory of the message that brought it, until its backward pass is done
result    handed to the mailbox; over gloo it lives until an answer shows that it has arrived (`parallel.pipeline_messages`)
gradient  of a result: a message, until its backward pass is done
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from ultrascale.plan.ledger import Held, Ledger
from ultrascale.plan.stage_player import StagePlayer
from ultrascale.plan.stage_replay import StageReplay
from ultrascale.plan.tally import Tally
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.messages import Message, made_by, read_by, receipts


class MailReplay:
    """The messages of one rank in one step."""

    def __init__(
        self, ledger: Ledger, tally: Tally, messages: Sequence[Message], rank: int, num_bytes: int, *, over_gloo: bool
    ):
        """`messages` of the whole step, `num_bytes` each."""
        self.ledger, self.tally, self.num_bytes, self.over_gloo = ledger, tally, num_bytes, over_gloo
        self.outgoing = {message.key: message for message in messages if message.sender == rank}
        self.incoming = {message.key: message for message in messages if message.receiver == rank}
        self._expected = deque(receipts(messages, rank))
        self._arriving: dict[tuple[bool, int, int], Held] = {}
        self._leaving: defaultdict[int, deque[tuple[Message, Held]]] = defaultdict(deque)

    def expect(self, position: int) -> None:
        """Memory for what is on its way when the action at `position` begins."""
        while self._expected and self._expected[0][0] <= position:
            self._arriving[self._expected.popleft()[1].key] = self.ledger.take("activations", "messages", self.num_bytes)

    def take(self, message: Message) -> Held:
        """What has arrived; what its sender has read by then is let go."""
        leaving = self._leaving[message.sender]
        while leaving and leaving[0][0].needed_by <= message.sent_by:
            self.ledger.drop(leaving.popleft()[1])
        return self._arriving.pop(message.key)

    def send(self, message: Message, held: Held) -> None:
        """Keep `held` until it has left. NCCL says when that is; soon, here at once."""
        layout = self.tally.layout
        self.tally.send("send", (layout.pp, layout.group("pp")[1]), self.num_bytes)
        if self.over_gloo:
            self._leaving[message.receiver].append((message, held))
        else:
            self.ledger.drop(held)

    def close(self) -> None:
        for leaving in self._leaving.values():
            for _, held in leaving:
                self.ledger.drop(held)
            leaving.clear()


class RankReplay:
    """The micro-batches in flight on a rank of a pipeline, in one step."""

    def __init__(self, ledger: Ledger, stages: Mapping[int, StageReplay | StagePlayer], mail: MailReplay, last_stage: int):
        self.ledger, self.stages, self.mail, self.last_stage = ledger, stages, mail, last_stage
        self._inputs: dict[tuple[int, int], Held] = {}
        self._postponed: dict[tuple[int, int], Held] = {}
        self._handed: dict[tuple[bool, int, int], Held] = {}

    def play(self, actions: Sequence[Action], step: int) -> None:
        """All of a rank's actions."""
        for position, action in enumerate(actions):
            self.mail.expect(position)
            for part in action.parts:
                given = self._take(part)
                self.ledger.mark("forward" if part.kind is Kind.FORWARD else "backward", step)
                self._do(part, given)
        self.mail.close()

    def _take(self, part: Action) -> Held | None:
        key = read_by(part, self.last_stage)
        if key is None:
            return None
        message = self.mail.incoming.get(key)
        return self._handed.pop(key) if message is None else self.mail.take(message)

    def _do(self, part: Action, given: Held | None) -> None:
        stage, at = self.stages[part.stage], (part.stage, part.micro_batch)
        if part.kind is Kind.FORWARD:
            if given is not None:
                self._inputs[at] = given
            self._pass_on(part, stage.forward(part.micro_batch, given))
        elif part.kind is Kind.INPUT_GRADIENT and part.stage == 0:  # nobody waits for it
            if given is not None:
                self._postponed[at] = given
        elif part.kind is Kind.WEIGHT_GRADIENT and part.stage > 0:
            stage.weight_gradients(part)
        else:
            given = self._postponed.pop(at, None) if part.kind is Kind.WEIGHT_GRADIENT else given
            result = stage.backward(part, given)
            for held in (given, self._inputs.pop(at, None)):
                if held is not None:
                    self.ledger.drop(held)
            self._pass_on(part, result)

    def _pass_on(self, part: Action, result: Held | None) -> None:
        key = made_by(part, self.last_stage)
        if result is None or key is None:
            return
        message = self.mail.outgoing.get(key)
        if message is None:
            self._handed[key] = result
        else:
            self.mail.send(message, result)
