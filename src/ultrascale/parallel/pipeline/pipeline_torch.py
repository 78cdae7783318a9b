"""Pipeline step under the runtime of torch.distributed.pipelining: the same list, passes and messages in torch's loop.

    2RECV_F0  2F0  2SEND_F0  ...     the list of `schedules` with its messages, placed where a mailbox starts them
                                     (`torch_actions`)
    F, B, I, W                       `pipeline_passes`: W is split in the modules, not in autograd's graph
                                     (`pipeline_weights` says why); gradients reduced where `schedules.sharded` says
    SEND, RECV                       `pipeline_messages`: torch's own have no time-out at the end of a step, hold sent tensors
                                     until then, and with 2.11 connect first within a step, each waiting for another

So bits and memory equal those of our own loop, for any layout. In addition it has torch's tooling: a profiler range per action
(`PP:2F0`), TORCH_LOGS, and torch's checks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ultrascale.parallel.pipeline.pipeline_messages import Mailbox
from ultrascale.parallel.pipeline.pipeline_parallel import Executed, Orders, Pipeline
from ultrascale.parallel.pipeline.pipeline_passes import Passes, Passing
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.messages import output_of, torch_actions
from ultrascale.torch_private import pipeline_runtime

_PipelineScheduleRuntime, _read_action = pipeline_runtime()
Key = tuple[bool, int, int]
"""Key of a result, as `Message.key`."""


class TorchPipeline(Pipeline):
    """One rank of a pipeline, with the interface of `Pipeline`."""

    def _run(self, orders: Orders, actions: Sequence[Action], passes: Passes, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.executed = []
        mailbox = Mailbox(orders.messages, self.groups, orders.num_stages - 1, shape=shape, dtype=dtype, device=self.device)
        step = _Step(self, mailbox, actions, Passing(self.stages, passes, self._weights))
        runtime = _Runtime(
            step, torch_actions(actions, orders.messages, self.rank, orders.num_stages), orders.num_micro_batches
        )
        with _one_error():
            runtime.step(return_outputs=False)
        mailbox.close()


@contextmanager
def _one_error() -> Iterator[None]:
    """Silences torch's list of every rank's actions at an error; ours names the one that failed."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    logger.addFilter(_is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


class _Step:
    """State shared by the stages of a rank in one step."""

    def __init__(self, pipeline: TorchPipeline, mailbox: Mailbox, actions: Sequence[Action], passing: Passing):
        self.pipeline, self.mailbox, self.passing = pipeline, mailbox, passing
        self.num_stages = mailbox.last_stage + 1
        parts = (part._replace(overlapped_with=None) for action in actions for part in action.parts)
        self._parts = {(part.kind, part.stage, part.micro_batch): part for part in parts}
        self._made: dict[Key, Tensor] = {}
        """Results waiting to be sent."""

    def do(self, kind: Kind, stage: int, micro_batch: int) -> None:
        """Wait for a pass's input and run the pass."""
        part = self._parts[kind, stage, micro_batch]
        received = self.mailbox.collect(part)
        start = time.perf_counter()
        self.pipeline.on_action(part)
        result = self.passing.do(part, received)
        key = output_of(part, self.mailbox.last_stage)
        if key is not None and key in self.mailbox.outgoing:
            assert result is not None
            self._made[key] = result
        else:
            self.mailbox.deliver(part, result)
        self.pipeline.executed.append(Executed(part, start, time.perf_counter()))

    def receive(self, key: Key) -> list[Any]:
        """Start receiving a result. Returns an empty list: torch's runtime has nothing to wait for."""
        self.mailbox.start(key)
        return []

    def send(self, key: Key) -> list[Any]:
        """Start sending a result. Returns an empty list: torch's runtime has nothing to wait for."""
        self.mailbox.send(self.mailbox.outgoing[key], self._made.pop(key))
        return []


class _Runtime(_PipelineScheduleRuntime):
    """Torch's runtime, given the list of one rank."""

    def __init__(self, step: _Step, cells: Iterable[str], num_micro_batches: int):
        super().__init__([_Stage(step, index) for index in step.pipeline.stages], num_micro_batches)
        self.pipeline_order_with_comms = {step.pipeline.rank: [_read_action(cell) for cell in cells]}

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Does nothing: every message has the shape given for the step."""


class _Stage(PipelineStage):
    """Stage for torch's runtime. It holds no module; `Passing` runs the passes."""

    def __init__(self, step: _Step, index: int):
        super().__init__(nn.Module(), index, step.num_stages, step.pipeline.device, group=step.pipeline.groups[0])
        self.step = step

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self.step.do(Kind.FORWARD, self.stage_index, fwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        self.step.do(Kind.BACKWARD if full_backward else Kind.INPUT_GRADIENT, self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *_: Any, **__: Any) -> None:
        self.step.do(Kind.WEIGHT_GRADIENT, self.stage_index, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self.step.receive((False, self.stage_index, fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self.step.receive((True, self.stage_index, bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self.step.send((False, self.stage_index + 1, fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        return self.step.send((True, self.stage_index - 1, bwd_chunk_id))

    def set_local_fwd_input(self, *_: Any, **__: Any) -> None:
        """Does nothing: the mailbox passes results between stages of one rank."""

    def set_local_bwd_input(self, *_: Any, **__: Any) -> None:
        """Does nothing, as above."""

    def get_local_bwd_output(self, mb_index: int) -> None:
        """Does nothing, as above."""
