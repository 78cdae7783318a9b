"""Messages between the stages of a pipeline, sent and received beside the computation.

A send starts when the result exists and nobody waits for it. A receive starts before the action that comes before its reader,
so that the message travels while that one computes; its memory becomes the stage's input. Between two ranks receives start in
the order of the sends, which is all that NCCL goes by, and each direction has a process group of its own on CUDA: NCCL orders
everything between two ranks of a group, and two sends would wait for each other.

A sent tensor must live until it has left. gloo does not say when; but whatever comes back from a rank was made after it had
read all that it needed before, so a message that arrives lets go of what its sender has read by then. What is left waits for
the end of the step: on the way back, when activations go, faster than these come.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale import heartbeat
from ultrascale.contact import meaning_of
from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.parallel.lost import LostRankError, profiler_range
from ultrascale.parallel.time_limits import wait_for
from ultrascale.schedules.actions import Action
from ultrascale.schedules.messages import Message, input_of, output_of, receive_order

BETWEEN_STAGES = "a message between stages"
"""Name of these messages for profilers."""


class PipelineError(LostRankError):
    """A message between stages did not arrive or could not be sent."""


class Mailbox:
    """The messages of one rank in one step."""

    def __init__(
        self,
        messages: Sequence[Message],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        last_stage: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`messages` of the whole step, each of `shape`; `groups` of the pipeline's ranks, for messages to higher and to lower
        ranks (on CPU they may be one)."""
        self.rank, self.groups, self.last_stage = groups[0].rank(), groups, last_stage
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.outgoing = {message.key: message for message in messages if message.sender == self.rank}
        self.incoming = {message.key: message for message in messages if message.receiver == self.rank}
        self._expected = deque(receive_order(messages, self.rank))
        self._delivered: dict[tuple[bool, int, int], Tensor] = {}
        self._arriving: dict[tuple[bool, int, int], tuple[Tensor, dist.Work | None]] = {}
        self._leaving: defaultdict[int, deque[tuple[Message, Tensor, dist.Work | None]]] = defaultdict(deque)

    def expect(self, position: int) -> None:
        """Start to receive what `receive_order` says should be on its way when the action at `position` begins."""
        while self._expected and self._expected[0][0] <= position:
            self._start(self._expected.popleft()[1])

    def collect(self, part: Action) -> Tensor | None:
        """Input that a pass reads from another pass, once it is here; None if it reads none. Raises PipelineError."""
        key = input_of(part, self.last_stage)
        if key is None:
            return None
        message = self.incoming.get(key)
        return self._delivered.pop(key) if message is None else self.take(message)

    def deliver(self, part: Action, result: Tensor | None) -> None:
        """Send what a pass has made, or keep it for another stage of this rank. Raises PipelineError."""
        key = output_of(part, self.last_stage)
        if key is None:
            return
        assert result is not None
        message = self.outgoing.get(key)
        if message is None:
            self._delivered[key] = result
        else:
            self.send(message, result)

    def start(self, key: tuple[bool, int, int]) -> None:
        """Start to receive the next that is expected, which is this one: with `torch_actions`, instead of `expect`."""
        _, message = self._expected.popleft()
        assert message.key == key, (message, key)
        self._start(message)

    def take(self, message: Message) -> Tensor:
        """The tensor of an expected message, once it is here. Raises PipelineError."""
        tensor, work = self._arriving.pop(message.key)
        self._wait(work, f"waited for {message}")
        self._release(message.sender, message.sent_by)
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send. Raises PipelineError if the receiver is known to be gone."""
        tensor = tensor.detach().contiguous()
        assert tensor.shape == self.shape and tensor.dtype == self.dtype, (tensor.shape, tensor.dtype, self.shape, self.dtype)
        group = self.groups[message.receiver < self.rank]
        try:
            with profiler_range(BETWEEN_STAGES):
                work = dist.isend(tensor, group=group, group_dst=message.receiver, tag=message.number)
        except RuntimeError as error:
            raise self._lost(f"could not send {message} to pipeline rank {message.receiver}", error) from error
        self._leaving[message.receiver].append((message, tensor, work))
        self._release(message.receiver)

    def _release(self, receiver: int, position: int = -1) -> None:
        """Forget what has left for `receiver`, which has come to `position` of its list. NCCL says itself what has left, and to
        wait for it would be to let the stream that computes wait."""
        leaving = self._leaving[receiver]
        if is_cuda(self.device):
            while leaving and ((work := leaving[0][2]) is None or work.is_completed()):
                leaving.popleft()
            return
        while leaving and leaving[0][0].needed_by <= position:
            self._wait(leaving.popleft()[2], "sent")

    def close(self) -> None:
        """Wait until all that was sent has left. Raises PipelineError."""
        assert not self._arriving and not self._expected, "messages that nobody has taken"
        for leaving in self._leaving.values():
            while leaving:
                message, _, work = leaving.popleft()
                self._wait(work, f"sent {message} to pipeline rank {message.receiver}, which did not take it")

    def _start(self, message: Message) -> None:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        group = self.groups[message.sender > self.rank]
        try:
            with profiler_range(BETWEEN_STAGES):
                work = dist.irecv(tensor, group=group, group_src=message.sender, tag=message.number)
        except RuntimeError as error:
            raise self._lost(f"waited for {message}", error) from error
        self._arriving[message.key] = tensor, work

    def _wait(self, work: dist.Work | None, what: str) -> None:
        try:
            if work is not None:
                with heartbeat.waits(f"pipeline rank {self.rank} {what}"), profiler_range(BETWEEN_STAGES):
                    wait_for(work, self.groups[0])
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: RuntimeError) -> PipelineError:
        return PipelineError(f"pipeline rank {self.rank} (rank {dist.get_rank()} of the run) {what}: {meaning_of(error)}")
