"""Pipeline parallelism: the lists of `schedules` executed, one rank's actions one after the other.

    F   take the stage's input (tokens, a message, or what another stage of this rank made), run the stage, send the result on
    B   take the gradient of the result, run the backward pass, send the gradient of the input back
    I   the same without the gradients of most weights        W   those; in the first stage, whose I nobody waits for, all of it
    F beside B   one after the other: nothing of ours runs two streams of computation

The planner plays the same lists (`plan.pipeline`). Of a micro-batch in flight a rank holds what autograd saved and the stage's
input; its result is let go when it has been sent. Sends and receives run beside the computation (`pipeline_messages`). A rank
sends one activation, [B, S, D], per micro-batch and border, and as much back.

Why not the runtime of torch.distributed.pipelining: it cuts backward passes in the graph (`pipeline_weights` says what that
costs), keeps sent results until the end of the step, reduces gradients of FSDP after all backward passes of a stage without
hiding any of it, whatever the ZeRO stage, and shapes, messages and losses are its own to find. What it does beside is here in
these lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ultrascale.models.decoder import Decoder
from ultrascale.parallel.data import prepare_action
from ultrascale.parallel.pipeline_data import order_gathers, prepare_backward, reduce_weight_gradients
from ultrascale.parallel.pipeline_messages import Mailbox
from ultrascale.parallel.pipeline_weights import Waiting, WeightGradients, make_gradients
from ultrascale.schedules.actions import Action, Kind, forward
from ultrascale.schedules.build import is_file, stages_of_ranks
from ultrascale.schedules.executable import Schedule, shape_of
from ultrascale.schedules.for_layout import schedule_of
from ultrascale.schedules.messages import Message, made_by, messages, only_forward, read_by
from ultrascale.schedules.sharded import sharded
from ultrascale.spec.layout import Layout

Passes = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, its input or None for the first stage) to what the next stage takes, of the last one the loss (0-d)."""


class Executed(NamedTuple):
    """An action as it was done; seconds of `time.perf_counter`, which all processes of a machine share."""

    action: Action
    start: float
    """When what it needs was there."""
    end: float


class Orders(NamedTuple):
    """A step for every rank."""

    schedule: Schedule
    messages: list[Message]
    num_stages: int

    @property
    def splits(self) -> bool:
        """Whether backward passes are cut in two."""
        return any(part.kind is Kind.INPUT_GRADIENT for row in self.schedule for action in row for part in action.parts)


class _Held(NamedTuple):
    """What a micro-batch leaves in a stage until its backward pass."""

    result: GradientEdge
    given: Tensor | None
    """The stage's input, a leaf of its graph; None: tokens."""


def build_orders(layout: Layout, num_micro_batches: int) -> Orders:
    """The step of `layout` with so many micro-batches on each rank. Raises SpecError as `schedule_of`."""
    schedule = schedule_of(layout, num_micro_batches)
    return Orders(schedule, messages(schedule), shape_of(schedule)[0])


def build_evaluation(layout: Layout, num_micro_batches: int) -> Orders:
    """The forward passes alone: a schedule's, or, of a file, which has a number of micro-batches of its own, plain ones."""
    if is_file(layout.schedule):
        held = stages_of_ranks(layout.schedule, layout.pp)
        schedule = [[forward(stage, k) for k in range(num_micro_batches) for stage in stages] for stages in held]
    else:
        schedule = only_forward(build_orders(layout, num_micro_batches).schedule)
    return Orders(schedule, messages(schedule), layout.num_stages)


_training, _evaluation = lru_cache(maxsize=16)(build_orders), lru_cache(maxsize=16)(build_evaluation)


@dataclass
class Pipeline:
    """One rank of a pipeline, with its stages.

    `groups`: the ranks of this pipeline in order, for messages to higher and to lower ranks
    (`Mesh.pipeline_groups`).
    """

    layout: Layout
    stages: Mapping[int, Decoder]
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup]
    device: torch.device
    on_action: Callable[[Action], None] = lambda action: None
    """Told each F, B, I and W before it begins."""
    executed: list[Executed] = field(init=False, default_factory=list)
    """The actions of the last step."""
    _weights: WeightGradients = field(init=False, default_factory=WeightGradients)
    _splits: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        for stage in self.stages.values():
            order_gathers(stage)

    @property
    def rank(self) -> int:
        """In the pipeline."""
        return self.groups[0].rank()

    def train(self, num_micro_batches: int, passes: Passes, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Every forward and backward pass of a step; gradients are left in the stages' parameters, reduced.

        `shape`, `dtype`: of the activations between stages. Losses are for `passes` to keep. Raises PipelineError if a rank is
        lost, and SpecError for a number of micro-batches that the schedule is not made for.
        """
        orders = _training(self.layout, num_micro_batches)
        if orders.splits and not self._splits:
            self._splits = True
            for stage in self.stages.values():
                self._weights.apply_to(stage)
        self._run(orders, sharded(orders.schedule[self.rank], self.layout.zero_stage), passes, shape, dtype)

    def evaluate(self, num_micro_batches: int, passes: Passes, *, shape: Sequence[int], dtype: torch.dtype) -> None:
        """The forward passes of any number of micro-batches, without gradients; otherwise as `train`."""
        orders = _evaluation(self.layout, num_micro_batches)
        with torch.no_grad():
            self._run(orders, orders.schedule[self.rank], passes, shape, dtype)

    def _run(self, orders: Orders, actions: Sequence[Action], passes: Passes, shape: Sequence[int], dtype: torch.dtype) -> None:
        mailbox = Mailbox(orders.messages, self.groups, shape=shape, dtype=dtype, device=self.device)
        passing = Passing(self.stages, passes, mailbox, self._weights, orders.num_stages - 1)
        self.executed = []
        for position, action in enumerate(actions):
            mailbox.expect(position)
            for part in (part._replace(beside=None) for part in action.parts):
                given = passing.take(part)
                start = time.perf_counter()
                self.on_action(part)
                passing.do(part, given)
                self.executed.append(Executed(part, start, time.perf_counter()))
        mailbox.close()


@dataclass
class Passing:
    """The micro-batches in flight on a rank, in one step."""

    stages: Mapping[int, Decoder]
    passes: Passes
    mailbox: Mailbox
    weights: WeightGradients
    last_stage: int
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    """[stage, micro-batch]: between F and B or I."""
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)
    """[stage, micro-batch]: between I and W."""
    _postponed: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """[stage, micro-batch]: gradients of results of the first stage, between I and W."""
    _handed: dict[tuple[bool, int, int], Tensor] = field(default_factory=dict)
    """Results for another stage of this rank."""

    def take(self, part: Action) -> Tensor | None:
        """What a pass reads of another, once it is here. Raises PipelineError."""
        key = read_by(part, self.last_stage)
        if key is None:
            return None
        message = self.mailbox.incoming.get(key)
        return self._handed.pop(key) if message is None else self.mailbox.take(message)

    def do(self, part: Action, given: Tensor | None) -> None:
        """One pass; `given`: what it reads."""
        stage, at = self.stages[part.stage], (part.stage, part.micro_batch)
        if part.kind is Kind.INPUT_GRADIENT and part.stage == 0:
            self._postponed[at] = given
            return
        if part.kind is Kind.WEIGHT_GRADIENT and at not in self._postponed:
            make_gradients(self.waiting.pop(at))
            reduce_weight_gradients(stage, part)
            return
        prepare = prepare_action if part.kind is Kind.FORWARD else prepare_backward
        prepare(stage, part)
        given = self._postponed.pop(at) if part.kind is Kind.WEIGHT_GRADIENT else given
        result = self._forward(part, given) if part.kind is Kind.FORWARD else self._backward(part, given)
        key = made_by(part, self.last_stage)
        if key is None:
            return
        assert result is not None
        message = self.mailbox.outgoing.get(key)
        if message is None:
            self._handed[key] = result
        else:
            self.mailbox.send(message, result)

    def _forward(self, part: Action, given: Tensor | None) -> Tensor:
        with_gradients = torch.is_grad_enabled()
        if given is not None and with_gradients:
            given.requires_grad_()
        result = self.passes(part.stage, part.micro_batch, given)
        if with_gradients:
            self.held[part.stage, part.micro_batch] = _Held(get_gradient_edge(result), given)
        return result.detach()

    def _backward(self, part: Action, gradient: Tensor | None) -> Tensor | None:
        at = (part.stage, part.micro_batch)
        result, given = self.held.pop(at)
        splits = part.kind is Kind.INPUT_GRADIENT
        with self.weights.put_off() if splits else nullcontext() as waiting:
            torch.autograd.backward(result, gradient)
        if splits:
            assert waiting is not None
            self.waiting[at] = waiting
        return None if given is None else given.grad
