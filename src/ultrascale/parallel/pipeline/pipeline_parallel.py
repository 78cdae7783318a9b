"""Pipeline parallelism: executes the action lists of `schedules`, one rank's actions one after the other.

    for each action: wait for its input (`pipeline_messages`), run the pass (`pipeline_passes`), send the result on
    a forward paired with a backward (DualPipe) runs before it, not concurrently: there is one compute stream

The planner simulates the same lists (`plan.pipeline.play`). For a micro-batch in flight a rank holds the tensors that autograd
saved and the stage's input; the stage's result is freed once it has been sent. Sends and receives overlap with computation
(`pipeline_messages`). A rank sends one activation, [B, S, D], per micro-batch and stage boundary, and one gradient of that size
back.

With layout.pipeline_runtime = "torch", the runtime of torch.distributed.pipelining executes list, passes and messages
(`pipeline_torch`) instead of the loop here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.pipeline.pipeline_data import order_gathers
from ultrascale.parallel.pipeline.pipeline_messages import Mailbox
from ultrascale.parallel.pipeline.pipeline_passes import Passes, Passing
from ultrascale.parallel.pipeline.pipeline_weights import WeightGradients
from ultrascale.schedules.actions import Action, Kind, forward, splits_backward
from ultrascale.schedules.build import is_file
from ultrascale.schedules.executable import Schedule, shape_of
from ultrascale.schedules.for_layout import schedule_of
from ultrascale.schedules.kinds.custom import read_schedule
from ultrascale.schedules.messages import Message, messages, only_forward
from ultrascale.schedules.sharded import sharded


class Executed(NamedTuple):
    """An executed action, with times in seconds of `time.perf_counter`, a clock shared by all processes of a machine."""

    action: Action
    start: float
    """Time at which its input had arrived, so waiting is not counted."""
    end: float


class Orders(NamedTuple):
    """Actions of a step for every rank of a pipeline, and the messages derived from them."""

    schedule: Schedule
    messages: list[Message]
    num_stages: int
    num_micro_batches: int

    @property
    def splits(self) -> bool:
        """True if backward passes are split into input- and weight-gradient passes."""
        return splits_backward(*self.schedule)


def build_orders(layout: Layout, num_micro_batches: int) -> Orders:
    """Actions of a training step of `layout` with this many micro-batches. Raises SpecError as `schedule_of`."""
    schedule = schedule_of(layout, num_micro_batches)
    return Orders(schedule, messages(schedule), shape_of(schedule)[0], num_micro_batches)


def build_evaluation(layout: Layout, num_micro_batches: int) -> Orders:
    """Actions of an evaluation: the forward passes only, in the schedule's order.

    A schedule from a file is written for one number of micro-batches, which an evaluation need not have. For other numbers the
    forward passes run in plain order, on the ranks to which the file assigns the stages.
    """
    if is_file(layout.schedule):
        from_file = read_schedule(Path(layout.schedule))
        ranks = {part[:3]: rank for rank, row in enumerate(from_file) for action in row for part in action.parts}
        schedule, count = [[] for _ in from_file], shape_of(from_file)[1]
        for k, stage in product(range(num_micro_batches), range(layout.num_stages)):
            schedule[ranks[Kind.FORWARD, k % count, stage]].append(forward(stage, k))
    else:
        schedule = only_forward(build_orders(layout, num_micro_batches).schedule)
    return Orders(schedule, messages(schedule), layout.num_stages, num_micro_batches)


_training, _evaluation = lru_cache(maxsize=16)(build_orders), lru_cache(maxsize=16)(build_evaluation)


@dataclass
class Pipeline:
    """One rank of a pipeline, with its stages.

    `groups`: process groups of this pipeline's ranks in order, for messages to higher and to lower ranks
    (`Mesh.pipeline_groups`).
    """

    layout: Layout
    stages: Mapping[int, Decoder]
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    device: torch.device
    on_action: Callable[[Action], None] = lambda action: None
    """Called with each F, B, I and W before it begins."""
    executed: list[Executed] = field(init=False, default_factory=list)
    """Executed actions of the last step."""
    _weights: WeightGradients = field(init=False, default_factory=WeightGradients)
    _splits: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        for stage in self.stages.values():
            order_gathers(stage)

    @property
    def rank(self) -> int:
        """Rank of this process in the pipeline, from 0."""
        return self.groups[0].rank()

    def train(self, num_micro_batches: int, passes: Passes, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Run every forward and backward pass of a step; the reduced gradients are left in the stages' parameters.

        `shape`, `dtype`: of the activations between stages. `passes` records the losses. Raises PipelineError if a rank is
        lost, and SpecError for a number of micro-batches that the schedule does not support.
        """
        orders = _training(self.layout, num_micro_batches)
        if orders.splits and not self._splits:
            self._splits = True
            for stage in self.stages.values():
                self._weights.apply_to(stage)
        self._run(orders, sharded(orders.schedule[self.rank], self.layout.zero_stage), passes, shape, dtype)

    def evaluate(self, num_micro_batches: int, passes: Passes, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Run the forward passes of any number of micro-batches, without gradients; otherwise as `train`."""
        orders = _evaluation(self.layout, num_micro_batches)
        with torch.no_grad():
            self._run(orders, orders.schedule[self.rank], passes, shape, dtype)

    def _run(self, orders: Orders, actions: Sequence[Action], passes: Passes, shape: Sequence[int], dtype: torch.dtype) -> None:
        mailbox = Mailbox(orders.messages, self.groups, orders.num_stages - 1, shape=shape, dtype=dtype, device=self.device)
        passing = Passing(self.stages, passes, self._weights)
        self.executed = []
        for position, action in enumerate(actions):
            mailbox.expect(position)
            for part in (part._replace(overlapped_with=None) for part in action.parts):
                received = mailbox.collect(part)
                start = time.perf_counter()
                self.on_action(part)
                mailbox.deliver(part, passing.do(part, received))
                del received
                self.executed.append(Executed(part, start, time.perf_counter()))
        mailbox.close()


def pipeline_of(layout: Layout) -> type[Pipeline]:
    """The pipeline with the runtime that `layout` selects."""
    if layout.pipeline_runtime == "torch":
        from ultrascale.parallel.pipeline.pipeline_torch import TorchPipeline  # its import takes seconds

        return TorchPipeline
    return Pipeline
