"""Messages between the ranks of a schedule, in order: activations to the next stage, gradients to the previous one.

    rank 0   0F0 --a0--> .   0F1 --a1--> .    0B0          a: activation, g: gradient, of that micro-batch
    rank 1         1F0 1B0 --g0--> 1F1 1B1 --g1-->

Between two ranks messages travel in the order in which the sender produces them, and the receiver posts its receives in that
order: NCCL has no tags. A pass on the same rank as its predecessor needs no message. All messages of a step have one size.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.executable import Schedule


class Message(NamedTuple):
    """One tensor sent from a rank to another."""

    number: int
    """Number within the step: by sender, and in sending order for each."""
    is_gradient: bool
    stage: int
    """Stage that reads the tensor."""
    micro_batch: int
    sender: int
    receiver: int
    sent_by: int
    """Position in the sender's list of the action that produces it."""
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
    """All messages of a step, by sender, in sending order; with `ranks`, only those between them. The schedule must be
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
    """Order in which `rank` posts its receives: pairs (position in its list of the action before which it does so, message).

    One message more than the actions so far need is in flight, so that it travels while the rank computes. (Not one more per
    action: a stage needs a message only at every other action, and half a step's would pile up.) Messages of one sender come in
    sending order.
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
    """Action list of `rank` with its messages, in the notation of torch.distributed.pipelining: 2RECV_F0, 2F0, 2SEND_F0.
    Overlapped passes are written one after the other."""
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
    """Result that a pass reads, as `Message.key`; None if it starts from tokens, from the loss, or from tensors its rank has
    kept."""
    if part.kind is Kind.FORWARD:
        return (False, part.stage, part.micro_batch) if part.stage else None
    if part.kind is Kind.WEIGHT_GRADIENT or part.stage == last_stage:
        return None
    return True, part.stage, part.micro_batch


def output_of(part: Action, last_stage: int) -> tuple[bool, int, int] | None:
    """Result that a pass produces for another stage, as `Message.key`; None if none."""
    if part.kind is Kind.FORWARD:
        return (False, part.stage + 1, part.micro_batch) if part.stage < last_stage else None
    if part.kind is Kind.WEIGHT_GRADIENT or part.stage == 0:
        return None
    return True, part.stage - 1, part.micro_batch


def only_forward(schedule: Schedule) -> list[list[Action]]:
    """Forward passes of a schedule in their order, for an evaluation. Forward passes depend only on each other, so the list
    stays executable."""
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
