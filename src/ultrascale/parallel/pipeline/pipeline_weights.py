"""Backward passes cut in two: I, the gradient of a stage's input, and W, the weights' gradients, later.

    forward   y = x w^T
    I         dx = dy w                 x and dy are kept for each weight, everything else of the micro-batch is let go
    W         dw += dy^T x

What waits is linear layers: all the matrix products but those of attention, which have no weights. Small gradients (norms,
biases, the embedding's rows), experts' and the head's, which its loss makes in the forward pass, are done in I. In fp8 both
factors wait rounded, 1 byte an element instead of 2, and W multiplies in fp8.

torch's `stage_backward_input` finds the cut in autograd's graph instead and works for any layer. It keeps the graph until W,
with all that its nodes hold, attention's queries, keys and values too; it walks the graph in Python for every micro-batch; what
torch.utils.checkpoint recomputes it recomputes twice; and an `autograd.Function` does not know which half is asked for and does
both each time. In a compiled block autograd sees one operation, and nothing could wait: `apply` refuses the two together.

Under tp with sequence parallelism what waits is this rank's positions: W gathers the others' again. That sends B S D (tp-1)/tp
elements more for each row product (a column product's input is gathered once either way), and of the input and output of a
block's halves, 4 B S D a layer and waiting micro-batch, leaves 1/tp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ultrascale.models.decoder import Decoder
from ultrascale.parallel.precision.fp8_products import Fp8Seams, fp8_seams_of
from ultrascale.parallel.tensor.tensor_ops import Defer, Factor, TensorParallel
from ultrascale.parallel.tensor.tensor_parallel import tensor_parallel_of
from ultrascale.torch_private import has_hooks

Multiply = Callable[[Tensor, Tensor], Tensor]
"""Product for a weight's gradient [F, D], from the gradient of an output [N, F] and an input [N, D], both as they waited."""
Waiting = list[tuple[Tensor, Factor, Factor, Multiply | None]]
"""(weight [F, D], gradient of the output [N, F], input [N, D]) of products whose weight's gradient is not made yet, and how it
is made of what is not plain numbers (`parallel.precision.fp8_products`)."""


class WeightGradients:
    """Puts off the weights' gradients of backward passes that ask for it."""

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self._seams: list[TensorParallel | Fp8Seams] = []

    @contextmanager
    def defer(self) -> Iterator[Waiting]:
        """Collect what waits of the backward passes inside."""
        self.waiting = collected = []
        self._set_deferral(self.add)
        try:
            yield collected
        finally:
            self.waiting = None
            self._set_deferral(None)

    def _set_deferral(self, defer: Defer | None) -> None:
        """Sets the shards' `defer` for this pass only: an undivided backward pass communicates beside the GEMMs of its
        weights' gradients."""
        for seam in self._seams:
            seam.defer = defer

    def add(self, weight: Tensor, grad_output: Factor, input_factor: Factor, multiply: Multiply | None = None) -> Tensor | None:
        """The gradient of `weight`, for the backward pass of a product that has one; None if it waits."""
        if self.waiting is None:
            return (multiply or _multiply)(grad_output.rows(), input_factor.rows())
        for factor in (grad_output, input_factor):
            factor.keep_local()
        self.waiting.append((weight, grad_output, input_factor, multiply))
        return None

    def apply_to(self, stage: Decoder) -> None:
        """Let every linear layer of `stage` ask here, in place: those that tp cuts through its seams."""
        for module in stage.modules():
            if isinstance(module, nn.Linear) and "forward" not in vars(module):
                setattr(module, "forward", partial(_linear, module, self))  # noqa: B010
        if (tp := tensor_parallel_of(stage)) is not None:
            self._seams.append(tp)
        if (seams := fp8_seams_of(stage)) is not None:
            self._seams.append(seams)


@torch.no_grad()
def make_gradients(waiting: Waiting) -> None:
    """W: add all that waits to the weights' gradients, and let go of it one by one."""
    while waiting:
        _make_gradient(*waiting.pop(0))  # a factor of no other product goes, and with it what was gathered


def _make_gradient(weight: Tensor, grad_output: Factor, input_factor: Factor, multiply: Multiply | None) -> None:
    if not weight.is_leaf or has_hooks(weight):  # a copy whose gradient travels on, or somebody who watches
        torch.autograd.backward(weight, (multiply or _multiply)(grad_output.rows(), input_factor.rows()))
    elif weight.grad is None:
        weight.grad = (multiply or _multiply)(grad_output.rows(), input_factor.rows())
    elif multiply is None:
        weight.grad.addmm_(grad_output.rows().t(), input_factor.rows())
    else:
        weight.grad += multiply(grad_output.rows(), input_factor.rows())


def _multiply(grad_output: Tensor, inputs: Tensor) -> Tensor:
    return grad_output.t() @ inputs


def _linear(module: nn.Linear, gradients: WeightGradients, hidden: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return F.linear(hidden, module.weight, module.bias)
    return _Linear.apply(hidden, module.weight, module.bias, gradients)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(hidden)
        # Not saved but held: recomputation would give a copy, and the gradient belongs to this very tensor.
        ctx.weight, ctx.gradients = weight, gradients
        return F.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), (grad_output,) = ctx.saved_tensors, grads
        with_input, with_weight, with_bias, _ = ctx.needs_input_grad
        grad_hidden = grad_output @ ctx.weight if with_input else None
        grad_weight = ctx.gradients.add(ctx.weight, Factor(grad_output), Factor(hidden)) if with_weight else None
        grad_bias = grad_output.flatten(0, -2).sum(0) if with_bias else None
        return grad_hidden, grad_weight, grad_bias, None
