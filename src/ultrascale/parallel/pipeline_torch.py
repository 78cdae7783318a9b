"""A step of a pipeline by the runtime of torch.distributed.pipelining: the same list and passes, torch's loop and messages.

    2RECV_F0  2F0  2SEND_F0  ...     the list of `schedules` with its messages, where a mailbox would start them (`lowered`)
    forward, backward, weights       `pipeline_passes`: W cut in the modules, not in autograd's graph (`pipeline_weights` says
                                     why), gradients reduced where `schedules.sharded` says
    sends and receives               torch's: over gloo, what is sent stays until the end of the step

So gradients have the bits of our own runtime, whatever the layout. It is for who wants torch's messages, or wants to know
whether ours are at fault.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ultrascale import heartbeat
from ultrascale.contact import why
from ultrascale.kernels.device_kind import is_cuda
from ultrascale.parallel.lost import LostRankError, is_lost
from ultrascale.parallel.pipeline import Executed, Orders, Pipeline
from ultrascale.parallel.pipeline_messages import PipelineError
from ultrascale.parallel.pipeline_passes import Passes, Passing
from ultrascale.parallel.time_limits import wait_for
from ultrascale.parallel.torch_private import pipeline_runtime
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.messages import Message, lowered, made_by, read_by

logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
"""Of an error it prints every action of every rank; ours names the one."""

_PipelineScheduleRuntime, _read_action = pipeline_runtime()
Key = tuple[bool, int, int]
"""A result, as `Message.key`."""


class TorchPipeline(Pipeline):
    """One rank of a pipeline, as `Pipeline`."""

    def _run(self, orders: Orders, actions: Sequence[Action], passes: Passes, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.executed = []
        step = _Step(self, orders, actions, Passing(self.stages, passes, self._weights), tuple(shape), dtype)
        runtime = _Runtime(step, lowered(actions, orders.messages, self.rank, orders.num_stages), orders.num_micro_batches)
        try:
            runtime.step(return_outputs=False)
        except LostRankError:
            raise
        except RuntimeError as error:
            if step.is_in_pass or not is_lost(error):
                raise
            rank = f"pipeline rank {self.rank} (rank {dist.get_rank()} of the run)"
            raise PipelineError(f"{rank} lost another rank in messages between stages: {why(error)}") from error


class _Step:
    """What the stages of a rank share in one step."""

    def __init__(
        self,
        pipeline: TorchPipeline,
        orders: Orders,
        actions: Sequence[Action],
        passing: Passing,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ):
        self.pipeline, self.passing, self.shape, self.dtype = pipeline, passing, shape, dtype
        self.num_stages, self.groups = orders.num_stages, pipeline.groups
        parts = (part._replace(beside=None) for action in actions for part in action.parts)
        self._parts = {(part.kind, part.stage, part.micro_batch): part for part in parts}
        self.incoming = {message.key: message for message in orders.messages if message.receiver == pipeline.rank}
        self.outgoing = {message.key: message for message in orders.messages if message.sender == pipeline.rank}
        self._here: dict[Key, Tensor] = {}
        """Results that have come, or are to be sent or read by another stage of this rank."""
        self._sent: list[Tensor] = []
        """What torch's runtime keeps anyway: it waits for what it sends at the end, and until then gloo's handles hold it."""
        self.is_in_pass = False

    def do(self, kind: Kind, stage: int, micro_batch: int) -> None:
        """One pass, which finds what it reads here and leaves here what it makes."""
        part = self._parts[kind, stage, micro_batch]
        read, made = read_by(part, self.num_stages - 1), made_by(part, self.num_stages - 1)
        given = None if read is None else self._here.pop(read)
        start = time.perf_counter()
        self.is_in_pass = True
        self.pipeline.on_action(part)
        result = self.passing.do(part, given)
        self.is_in_pass = False
        if made is not None:
            assert result is not None
            self._here[made] = result
        self.pipeline.executed.append(Executed(part, start, time.perf_counter()))

    def receive(self, key: Key) -> list[dist.P2POp]:
        """How torch's runtime is to receive a result."""
        message = self.incoming[key]
        self._here[key] = torch.empty(self.shape, dtype=self.dtype, device=self.pipeline.device)
        return [self._operation(dist.irecv, self._here[key], message, message.sender)]

    def send(self, key: Key) -> list[dist.P2POp]:
        """How it is to send one."""
        message, tensor = self.outgoing[key], self._here.pop(key).contiguous()
        if not is_cuda(self.pipeline.device):
            self._sent.append(tensor)
        return [self._operation(dist.isend, tensor, message, message.receiver)]

    def _operation(self, operation: Any, tensor: Tensor, message: Message, peer: int) -> dist.P2POp:
        group = self.groups[message.receiver < message.sender]
        return dist.P2POp(operation, tensor, group=group, tag=message.number, group_peer=peer)

    def wait(self, works: Sequence[dist.Work], key: Key) -> None:
        """Until a result has come. Raises PipelineError."""
        rank = f"pipeline rank {self.pipeline.rank}"
        what = f"waited for {self.incoming[key]}"
        try:
            with heartbeat.waits(f"{rank} {what}"):
                for work in works:
                    wait_for(work, self.groups[0])
        except RuntimeError as error:
            raise PipelineError(f"{rank} (rank {dist.get_rank()} of the run) {what}: {why(error)}") from error


class _Runtime(_PipelineScheduleRuntime):
    """Torch's runtime with the list of one rank."""

    def __init__(self, step: _Step, cells: Iterator[str], num_micro_batches: int):
        super().__init__([_Stage(step, index) for index in step.pipeline.stages], num_micro_batches)
        self.pipeline_order_with_comms = {step.pipeline.rank: [_read_action(cell) for cell in cells]}
        self.fwd_recv_ops, self.bwd_recv_ops = _Receipts(step, False), _Receipts(step, True)

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing: every message has the shape that the step was given."""


class _Receipts(dict[tuple[int, int], list[dist.Work]]):
    """Receives under way, [stage, micro-batch]; what is taken out has been waited for."""

    def __init__(self, step: _Step, is_gradient: bool):
        super().__init__()
        self._step, self._is_gradient = step, is_gradient

    def pop(self, key: tuple[int, int], *_: Any) -> list[dist.Work]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._step.wait(super().pop(key), (self._is_gradient, *key))
        return []


class _Stage(PipelineStage):
    """What torch's runtime asks of a stage. It is shown no module: what it would do with one is done in `Passing`."""

    def __init__(self, step: _Step, index: int):
        super().__init__(nn.Module(), index, step.num_stages, step.pipeline.device, group=step.groups[0])
        self.step = step

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self.step.do(Kind.FORWARD, self.stage_index, fwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        self.step.do(Kind.BACKWARD if full_backward else Kind.INPUT_GRADIENT, self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self.step.do(Kind.WEIGHT_GRADIENT, self.stage_index, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self.step.receive((False, self.stage_index, fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self.step.receive((True, self.stage_index, bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self.step.send((False, self.stage_index + 1, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self.step.send((True, self.stage_index - 1, bwd_chunk_id))

    def set_local_fwd_input(self, *_: Any) -> None:
        """Nothing: what one stage of a rank makes for another is where that looks for it."""

    set_local_bwd_input = set_local_fwd_input

    def get_local_bwd_output(self, mb_index: int) -> None:
        """Nothing, as above."""
