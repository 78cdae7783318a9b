"""The feed-forward layer of long sequences, computed in pieces: its wide activations exist for one piece at a time.

    forward    for each piece of the tokens    gate, up [n, F]; their product; down into its rows of the result
    backward   for each piece                  gate and up again; the gradients of all three; sums of the weights' gradients

A dense layer saves 3 F elements per token (gate, up, their product), two thirds of what a Llama block saves. Here it saves only
its input, and 3 F N/chunks elements exist for a moment. The price is computing gate and up a second time, two thirds of the
layer's forward pass; down is not recomputed. Tokens do not interact in this layer, so the sequence can be cut anywhere. Weight
gradients are summed over pieces, in fp32 where parameters are narrower.

Why not torch.utils.checkpoint around each piece: each piece would produce a full-size gradient of every weight, and the pieces
of the result would be concatenated into a second copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from ultrascale.description.layout import Layout
from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.models.decoder import Decoder
from ultrascale.models.feed_forward import MLP, activate


def apply_mlp_chunks(stage: Decoder, layout: Layout) -> None:
    """Make the dense feed-forward layers of `stage` compute in `layout.mlp_chunks` pieces, in place; call it before
    recomputation is applied."""
    if layout.mlp_chunks == 1:
        return
    for _, block in stage.blocks():
        if isinstance(block.mlp, MLP):
            setattr(block.mlp, "forward", partial(_forward, block.mlp, layout.mlp_chunks))  # noqa: B010


def _forward(mlp: MLP, chunks: int, hidden: Tensor) -> Tensor:
    """[B, S, D] to [B, S, D]."""
    linears = [*mlp.projections, mlp.down_proj]
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    return _Chunked.apply(hidden, chunks, mlp.activation, len(linears), *weights, *biases)  # pyright: ignore[reportReturnType]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: int, activation: str, count: int, *parameters: Tensor | None) -> Tensor:
        rows = hidden.flatten(0, -2)  # [N, D]
        weights, biases = parameters[:count], parameters[count:]
        ctx.size, ctx.activation, ctx.count = -(-len(rows) // chunks), activation, count
        ctx.save_for_backward(hidden, *parameters)
        out = torch.empty_like(rows)
        for piece, into in zip(rows.split(ctx.size), out.split(ctx.size), strict=True):
            _linear_into(into, activate(activation, *_column_linear(piece, weights[:-1], biases[:-1])), weights[-1], biases[-1])
        return out.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.count], parameters[ctx.count :]
        sums = [None if tensor is None else tensor.new_zeros(tensor.shape, dtype=wide_dtype(tensor)) for tensor in parameters]
        rows, grad = hidden.flatten(0, -2), grads[0].flatten(0, -2)
        of_rows = torch.empty_like(rows)
        layer = _Layer(ctx.activation, weights, biases, sums[: ctx.count], sums[ctx.count :])
        for piece, of_out, into in zip(*(tensor.split(ctx.size) for tensor in (rows, grad, of_rows)), strict=True):
            layer.backward(piece, of_out, into)
        parameter_grads = [
            None if total is None else total.to(tensor.dtype) for total, tensor in zip(sums, parameters, strict=True)
        ]
        return of_rows.view_as(hidden), None, None, None, *parameter_grads


class _Layer(NamedTuple):
    """A layer's parameters and the sums of their gradients; down comes last in both."""

    activation: str
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    of_weights: Sequence[Any]
    of_biases: Sequence[Any]

    def backward(self, piece: Tensor, of_out: Tensor, into: Tensor) -> None:
        """Backward pass of a piece [n, D], from the gradient of its result: writes the input's gradient to `into` and
        accumulates the weights' gradients."""
        weights = self.weights
        inner = [output.requires_grad_() for output in _column_linear(piece, weights[:-1], self.biases[:-1])]
        with torch.enable_grad():
            product = activate(self.activation, *inner)
        _add_product(self.of_weights[-1], self.of_biases[-1], of_out, product.detach())
        edge = get_gradient_edge(product)
        del product
        of_inner = torch.autograd.grad([edge], inner, [of_out @ weights[-1]])  # pyright: ignore[reportArgumentType]
        torch.mm(of_inner[0], weights[0], out=into)
        for grad, weight in zip(of_inner[1:], weights[1:-1], strict=True):
            into.addmm_(grad, weight)
        for grad, of_weight, of_bias in zip(of_inner, self.of_weights[:-1], self.of_biases[:-1], strict=True):
            _add_product(of_weight, of_bias, grad, piece)


def _column_linear(piece: Tensor, weights: Any, biases: Any) -> list[Tensor]:
    return [F.linear(piece, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _linear_into(into: Tensor, product: Tensor, weight: Any, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(product, weight.t(), out=into)
    else:
        torch.addmm(bias, product, weight.t(), out=into)


def _add_product(of_weight: Any, of_bias: Tensor | None, of_result: Tensor, inputs: Tensor) -> None:
    """Add one piece's contribution to the gradients of a linear layer."""
    if of_weight.dtype == inputs.dtype:
        of_weight.addmm_(of_result.t(), inputs)
    else:
        of_weight.add_(torch.mm(of_result.t(), inputs))
    if of_bias is not None:
        of_bias.add_(of_result.sum(0))
