"""F, B, I and W of a rank's stages, and what a micro-batch leaves there between them. When and with what is a runtime's to say.

F   take the stage's input (tokens, a message, or what another stage of this rank made), run the stage
B   take the gradient of the result, run the backward pass
I   the same without the gradients of most weights        W   those; in the first stage, whose I nobody waits for, all of it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ultrascale.models.decoder import Decoder
from ultrascale.parallel.data.data_parallel import prepare_action
from ultrascale.parallel.pipeline.pipeline_data import prepare_backward, reduce_weight_gradients
from ultrascale.parallel.pipeline.pipeline_weights import Waiting, WeightGradients, make_gradients
from ultrascale.schedules.actions import Action, Kind

Passes = Callable[[int, int, Tensor | None], Tensor]
"""(stage, micro-batch, its input or None for the first stage) to what the next stage takes, of the last one the loss (0-d)."""


class _Held(NamedTuple):
    """The tensors that a micro-batch leaves in a stage until its backward pass."""

    result: GradientEdge
    given: Tensor | None
    """The stage's input, a leaf of its graph; None: tokens."""


@dataclass
class Passing:
    """The micro-batches in flight on a rank, in one step."""

    stages: Mapping[int, Decoder]
    passes: Passes
    weights: WeightGradients
    held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    """[stage, micro-batch]: between F and B or I."""
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)
    """[stage, micro-batch]: between I and W."""
    _postponed: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """[stage, micro-batch]: gradients of results of the first stage, between I and W."""

    def do(self, part: Action, given: Tensor | None) -> Tensor | None:
        """One pass. `given`: what it reads of another (`schedules.messages.read_by`). Returns what the next stage, or the one
        before, reads of it; of others what is of no use to them."""
        stage, at = self.stages[part.stage], (part.stage, part.micro_batch)
        if part.kind is Kind.INPUT_GRADIENT and part.stage == 0:
            self._postponed[at] = given
            return None
        if part.kind is Kind.WEIGHT_GRADIENT and at not in self._postponed:
            make_gradients(self.waiting.pop(at))
            reduce_weight_gradients(stage, part)
            return None
        prepare = prepare_action if part.kind is Kind.FORWARD else prepare_backward
        prepare(stage, part)
        given = self._postponed.pop(at) if part.kind is Kind.WEIGHT_GRADIENT else given
        return self._forward(part, given) if part.kind is Kind.FORWARD else self._backward(part, given)

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
