"""Messages between the stages of a pipeline, sent and received asynchronously, overlapping with computation.

A send starts as soon as the result exists, and nothing waits for it. A receive is posted before the action that precedes its
reader, so that the message travels while that action computes; its buffer becomes the stage's input. Between two ranks receives
are posted in the order of the sends, the only matching NCCL has. On CUDA each direction has its own process group: NCCL runs
all operations between two ranks of a group in order, and two opposite sends would deadlock.

A sent tensor must stay alive until it has been transmitted. gloo does not report that; but a rank sends a message only after it
has read everything it needed before, so an arriving message allows tensors that its sender has read to be freed. The rest is
freed at the end of the step: in the backward pass activations are freed faster than sent gradients accumulate.
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
"""Name of these messages in profiler traces."""


class PipelineError(LostRankError):
    """A message between stages did not arrive or could not be sent."""


class Mailbox:
    """Messages of one rank in one step."""

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
        """`messages`: of the whole step, each of `shape`; `groups`: of the pipeline's ranks, for messages to higher and to
        lower ranks (the same group on CPU is allowed)."""
        self.rank, self.groups, self.last_stage = groups[0].rank(), groups, last_stage
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        self.outgoing = {message.key: message for message in messages if message.sender == self.rank}
        self.incoming = {message.key: message for message in messages if message.receiver == self.rank}
        self._expected = deque(receive_order(messages, self.rank))
        self._delivered: dict[tuple[bool, int, int], Tensor] = {}
        self._arriving: dict[tuple[bool, int, int], tuple[Tensor, dist.Work | None]] = {}
        self._leaving: defaultdict[int, deque[tuple[Message, Tensor, dist.Work | None]]] = defaultdict(deque)

    def expect(self, position: int) -> None:
        """Post the receives that `receive_order` assigns to the start of the action at `position`."""
        while self._expected and self._expected[0][0] <= position:
            self._start(self._expected.popleft()[1])

    def collect(self, part: Action) -> Tensor | None:
        """Wait for and return the input that a pass reads from another pass; None if it reads none. Raises PipelineError."""
        key = input_of(part, self.last_stage)
        if key is None:
            return None
        message = self.incoming.get(key)
        return self._delivered.pop(key) if message is None else self.take(message)

    def deliver(self, part: Action, result: Tensor | None) -> None:
        """Send the result of a pass, or keep it for another stage of this rank. Raises PipelineError."""
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
        """Post the next expected receive, which must be this one: used with `torch_actions`, instead of `expect`."""
        _, message = self._expected.popleft()
        assert message.key == key, (message, key)
        self._start(message)

    def take(self, message: Message) -> Tensor:
        """Wait for and return the tensor of an expected message. Raises PipelineError."""
        tensor, work = self._arriving.pop(message.key)
        self._wait(work, f"waited for {message}")
        self._release(message.sender, message.sent_by)
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending. Raises PipelineError if the receiver is known to be gone."""
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
        """Free tensors that `receiver` has read, given that it has reached `position` of its list. NCCL tracks completion
        itself, and waiting for it would block the compute stream."""
        leaving = self._leaving[receiver]
        if is_cuda(self.device):
            while leaving and ((work := leaving[0][2]) is None or work.is_completed()):
                leaving.popleft()
            return
        while leaving and leaving[0][0].needed_by <= position:
            self._wait(leaving.popleft()[2], "sent")

    def close(self) -> None:
        """Wait until all sends are complete. Raises PipelineError."""
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
