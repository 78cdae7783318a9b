"""Passes F, B, I and W of a rank's stages, and the tensors that a micro-batch leaves there between them. The runtime decides
when each pass runs and with which input.

F   take the stage's input (tokens, a message, or the result of another stage of this rank), run the stage
B   take the gradient of the result, run the backward pass
I   the same without most weight gradients               W   those gradients; the first stage, whose I nobody waits for, runs
                                                             its whole backward pass in W
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
"""Function from (stage, micro-batch, its input or None for the first stage) to the next stage's input; on the last stage, to
the loss (0-d)."""


class _InFlight(NamedTuple):
    """Tensors that a micro-batch keeps in a stage until its backward pass."""

    result: GradientEdge
    received: Tensor | None
    """The stage's input, a leaf of its graph; None for tokens."""


@dataclass
class Passing:
    """Micro-batches in flight on a rank, in one step."""

    stages: Mapping[int, Decoder]
    passes: Passes
    weights: WeightGradients
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    """Tensors between F and B or I, by (stage, micro-batch)."""
    waiting: dict[tuple[int, int], Waiting] = field(default_factory=dict)
    """Deferred weight gradients between I and W, by (stage, micro-batch)."""
    _deferred: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    """Gradients of the first stage's results between I and W, by (stage, micro-batch)."""

    def do(self, part: Action, received: Tensor | None) -> Tensor | None:
        """Run one pass. `received`: its input from another pass (`schedules.messages.input_of`). Returns the tensor that the
        next stage (after F) or the previous one (after B or I) reads; after other passes the value has no use."""
        stage, key = self.stages[part.stage], (part.stage, part.micro_batch)
        if part.kind is Kind.INPUT_GRADIENT and part.stage == 0:
            self._deferred[key] = received
            return None
        if part.kind is Kind.WEIGHT_GRADIENT and key not in self._deferred:
            make_gradients(self.waiting.pop(key))
            reduce_weight_gradients(stage, part)
            return None
        prepare = prepare_action if part.kind is Kind.FORWARD else prepare_backward
        prepare(stage, part)
        received = self._deferred.pop(key) if part.kind is Kind.WEIGHT_GRADIENT else received
        return self._forward(part, received) if part.kind is Kind.FORWARD else self._backward(part, received)

    def _forward(self, part: Action, received: Tensor | None) -> Tensor:
        with_gradients = torch.is_grad_enabled()
        if received is not None and with_gradients:
            received.requires_grad_()
        result = self.passes(part.stage, part.micro_batch, received)
        if with_gradients:
            self.in_flight[part.stage, part.micro_batch] = _InFlight(get_gradient_edge(result), received)
        return result.detach()

    def _backward(self, part: Action, gradient: Tensor | None) -> Tensor | None:
        key = (part.stage, part.micro_batch)
        result, received = self.in_flight.pop(key)
        splits = part.kind is Kind.INPUT_GRADIENT
        with self.weights.defer() if splits else nullcontext() as waiting:
            torch.autograd.backward(result, gradient)
        if splits:
            assert waiting is not None
            self.waiting[key] = waiting
        return None if received is None else received.grad
