"""Messages between the ranks of a schedule, in order: activations to the next stage, gradients to the one before.

    rank 0   0F0 --a0--> .   0F1 --a1--> .    0B0          a: activation, g: gradient, of that micro-batch
    rank 1         1F0 1B0 --g0--> 1F1 1B1 --g1-->

Between two ranks messages travel in the order in which the sender makes them, and the receiver asks for them in that order:
NCCL knows no tags. A pass on the rank of the pass before it needs no message. Every message of a step has one size.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.executable import Schedule


class Message(NamedTuple):
    """One tensor on its way from a rank to another."""

    number: int
    """In the whole step: senders in order, and what each sends in order."""
    is_gradient: bool
    stage: int
    """Stage that reads the tensor."""
    micro_batch: int
    sender: int
    receiver: int
    sent_by: int
    """Position in the sender's list of the action that makes it."""
    needed_by: int
    """Position in the receiver's list of the action that reads it."""

    @property
    def key(self) -> tuple[bool, int, int]:
        """Identity of the tensor: (is_gradient, stage that reads it, micro-batch)."""
        return self.is_gradient, self.stage, self.micro_batch

    def __str__(self) -> str:
        what = "gradient" if self.is_gradient else "activation"
        source = self.stage + 1 if self.is_gradient else self.stage - 1
        return f"the {what} of micro-batch {self.micro_batch} from stage {source} (pipeline rank {self.sender})"


def messages(schedule: Schedule, ranks: Iterable[int] | None = None) -> list[Message]:
    """Every message of a step, by sender, in the order of sending; of some `ranks`, those between them. The schedule must be
    executable."""
    passes = [*_passes(schedule, range(len(schedule)) if ranks is None else ranks)]
    last = max(part.stage for _, _, part in passes)
    readers = {key: (rank, position) for rank, position, part in passes if (key := input_of(part, last)) is not None}
    sends: list[Message] = []
    for rank, position, part in passes:
        key = output_of(part, last)
        if key in readers and readers[key][0] != rank:
            receiver, needed_by = readers[key]
            sends.append(Message(len(sends), *key, rank, receiver, position, needed_by))
    return sends


def receive_order(messages: Sequence[Message], rank: int) -> list[tuple[int, Message]]:
    """When `rank` starts to receive what, in order: (position in its list of the action before which it does, message).

    One message more than the actions so far need is on its way, so that it travels while one computes. (Not one more with every
    action: a stage takes a message with every other, and half a step's would pile up.) From a rank they come as it sends them.
    """
    incoming = [message for message in messages if message.receiver == rank]
    channels: defaultdict[int, deque[Message]] = defaultdict(deque)
    for message in incoming:
        channels[message.sender].append(message)
    started: list[tuple[int, Message]] = []
    position = 0
    for needed in sorted(incoming, key=lambda message: message.needed_by):
        channel = channels[needed.sender]
        while channel and channel[0].number <= needed.number:
            started.append((position, channel.popleft()))
        position = needed.needed_by
    return started


def torch_actions(actions: Sequence[Action], messages: Sequence[Message], rank: int, num_stages: int) -> Iterator[str]:
    """The list of `rank` with its messages, in the words of torch.distributed.pipelining: 2RECV_F0, 2F0, 2SEND_F0. Passes that
    run at the same time are written one after the other."""
    outgoing = {message.key for message in messages if message.sender == rank}
    expected = deque(receive_order(messages, rank))
    for position, action in enumerate(actions):
        while expected and expected[0][0] <= position:
            is_gradient, stage, micro_batch = expected.popleft()[1].key
            yield f"{stage}RECV_{'FB'[is_gradient]}{micro_batch}"
        for part in action.parts:
            yield part._replace(overlapped_with=None).cell
            key = output_of(part, num_stages - 1)
            if key is not None and key in outgoing:
                yield f"{part.stage}SEND_{'FB'[key[0]]}{part.micro_batch}"


def input_of(part: Action, last_stage: int) -> tuple[bool, int, int] | None:
    """The result that a pass reads, as `Message.key`; None: it starts from tokens, the loss, or what its rank has kept."""
    if part.kind is Kind.FORWARD:
        return (False, part.stage, part.micro_batch) if part.stage else None
    if part.kind is Kind.WEIGHT_GRADIENT or part.stage == last_stage:
        return None
    return True, part.stage, part.micro_batch


def output_of(part: Action, last_stage: int) -> tuple[bool, int, int] | None:
    """The result that a pass makes for another stage, as `Message.key`."""
    if part.kind is Kind.FORWARD:
        return (False, part.stage + 1, part.micro_batch) if part.stage < last_stage else None
    if part.kind is Kind.WEIGHT_GRADIENT or part.stage == 0:
        return None
    return True, part.stage - 1, part.micro_batch


def only_forward(schedule: Schedule) -> list[list[Action]]:
    """The forward passes of a schedule in their order: an evaluation. They wait for nothing else, so it stays executable."""
    forward = (
        [part._replace(overlapped_with=None) for action in row for part in action.parts if part.kind is Kind.FORWARD]
        for row in schedule
    )
    return list(forward)


def _passes(schedule: Schedule, ranks: Iterable[int]) -> Iterator[tuple[int, int, Action]]:
    for rank in ranks:
        for position, action in enumerate(schedule[rank]):
            for part in action.parts:
                yield rank, position, part
