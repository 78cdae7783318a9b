"""Split backward passes: I computes the gradient of a stage's input, and W the weights' gradients, later (zero-bubble
schedules).

    forward   y = x w^T
    I         dx = dy w                 x and dy are kept for each weight; all other tensors of the micro-batch are freed
    W         dw += dy^T x

Deferred are the weight gradients of linear layers: all GEMMs but attention's, which have no weights. Small gradients (norms,
biases, the embedding's rows), the experts', and the head's (computed with its loss in the forward pass) are computed in I. In
fp8 both factors are kept in fp8, 1 byte an element instead of 2, and W multiplies in fp8.

torch's `stage_backward_input` instead splits autograd's graph, for any layer. But it keeps the graph until W, with every tensor
its nodes hold, attention's queries, keys and values included; it walks the graph in Python for every micro-batch; it runs the
recomputation of torch.utils.checkpoint twice; and an `autograd.Function` does not know which half is wanted and computes both
each time. In a compiled block autograd sees one operation, of which nothing can be deferred: `apply` refuses the combination.

Under tp with sequence parallelism only this rank's positions are kept: W gathers the other ranks' again. That sends B S D
(tp-1)/tp elements more per row-parallel product (a column-parallel product's input is gathered once either way), and keeps only
1/tp of the input and output of a block's halves, 4 B S D a layer and deferred micro-batch.
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
"""Product that computes a weight's gradient [F, D] from the gradient of an output [N, F] and an input [N, D], both as kept."""
Waiting = list[tuple[Tensor, Factor, Factor, Multiply]]
"""Deferred products: (weight [F, D], gradient of the output [N, F], input [N, D], and the function that multiplies factors that
are not plain tensors (`parallel.precision.fp8_products`))."""


def _multiply(grad_output: Tensor, inputs: Tensor) -> Tensor:
    return grad_output.t() @ inputs


class WeightGradients:
    """Defers the weight gradients of backward passes that are split."""

    def __init__(self) -> None:
        self.waiting: Waiting | None = None
        self._seams: list[TensorParallel | Fp8Seams] = []

    @contextmanager
    def defer(self) -> Iterator[Waiting]:
        """Collect the weight gradients deferred by the backward passes inside."""
        self.waiting = collected = []
        self._set_deferral(self.add)
        try:
            yield collected
        finally:
            self.waiting = None
            self._set_deferral(None)

    def _set_deferral(self, defer: Defer | None) -> None:
        """Set the seams' `defer` for this pass only: an unsplit backward pass overlaps communication with the GEMMs of its
        weight gradients."""
        for seam in self._seams:
            seam.defer = defer

    def add(self, weight: Tensor, grad_output: Factor, input_factor: Factor, multiply: Multiply = _multiply) -> Tensor | None:
        """Gradient of `weight`, for the backward pass of a product; None if it is deferred."""
        if self.waiting is None:
            return multiply(grad_output.rows(), input_factor.rows())
        for factor in (grad_output, input_factor):
            factor.keep_local()
        self.waiting.append((weight, grad_output, input_factor, multiply))
        return None

    def apply_to(self, stage: Decoder) -> None:
        """Make every linear layer of `stage` call `add` for its weight gradient, in place; layers sharded by tp do so through
        their seams."""
        for module in stage.modules():
            if isinstance(module, nn.Linear) and "forward" not in vars(module):
                setattr(module, "forward", partial(_linear, module, self))  # noqa: B010
        if (tp := tensor_parallel_of(stage)) is not None:
            self._seams.append(tp)
        if (seams := fp8_seams_of(stage)) is not None:
            self._seams.append(seams)


@torch.no_grad()
def make_gradients(waiting: Waiting) -> None:
    """W: add all deferred gradients to the weights' gradients, freeing each pair of factors in turn."""
    while waiting:
        _make_gradient(*waiting.pop(0))  # frees factors that no other product uses, and their gathered rows


def _make_gradient(weight: Tensor, grad_output: Factor, input_factor: Factor, multiply: Multiply) -> None:
    if not weight.is_leaf or has_hooks(weight):  # its gradient flows on to the parameter, or a hook reads it
        torch.autograd.backward(weight, multiply(grad_output.rows(), input_factor.rows()))
    elif weight.grad is None:
        weight.grad = multiply(grad_output.rows(), input_factor.rows())
    elif multiply is _multiply:
        weight.grad.addmm_(grad_output.rows().t(), input_factor.rows())
    else:
        weight.grad += multiply(grad_output.rows(), input_factor.rows())


def _linear(module: nn.Linear, gradients: WeightGradients, hidden: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return F.linear(hidden, module.weight, module.bias)
    return _DeferredLinear.apply(hidden, module.weight, module.bias, gradients)  # pyright: ignore[reportReturnType]


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, gradients: WeightGradients) -> Tensor:
        ctx.save_for_backward(hidden)
        # Held as an attribute, not saved: recomputation would return a copy, but the gradient belongs to this tensor.
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
