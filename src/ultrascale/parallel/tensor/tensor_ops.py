"""Tensor parallelism within a block: column-parallel projections, then a row-parallel one (Shoeybi et al. 2019; with sequence
parallelism Korthikanti et al. 2022).

                            forward                                 backward
    column-parallel     x   gather [B, S/tp, D] -> [B, S, D]        dx = sum of g W, summed over ranks to [B, S/tp, D]
    (q k v, gate up)    y   x W^T, F/tp columns of each             dW = g^T x, with x gathered once more meanwhile
    row-parallel        z   y W^T, summed over ranks to             dy = g W and dW = g^T y, with
                            [B, S/tp, D]                            g [B, S, D] gathered from [B, S/tp, D]

Without sequence parallelism both gathers disappear, and the two sums leave [B, S, D] on every rank. Sums are sums, never means:
the transpose of an all-gather is a sum, without any scale factor.

Saved for the backward pass: x as received, D S/tp wide (gathering it again costs (tp-1)/tp of B S D elements and overlaps with
dx; saving all of x would take tp times the memory), the weights, and y. Overlap: in the backward pass of column-parallel
products x is gathered during dx, and dx scattered during dW.

Each direction is one custom torch operation (`ultrascale::...`), so that selective recomputation can save its result and not
communicate again, and the compiler sees one node without tracing inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional as F

from ultrascale.kernels.choice.wide import at_least_fp32
from ultrascale.parallel.tensor.tensor_overlap import gathered_products, overlaps, scattered_product
from ultrascale.parallel.tensor.tensor_traffic import all_gather_sequence, sum_sequence
from ultrascale.torch_private import group_named
from ultrascale.work.sharding.places import even_part


@custom_op("ultrascale::column_products", mutates_args=())
def column_products(hidden: Tensor, weights: list[Tensor], biases: list[Tensor], group: str, length: int) -> list[Tensor]:
    """Column-parallel products: [B, S/tp, D] and weights [F, D] to [B, S, F] each; `length` is S, or 0 where `hidden` is
    already [B, S, D]."""
    if overlaps(hidden, group, length, group_named(group).size()):
        _, products = gathered_products(hidden, weights, group)
        return [product + bias for product, bias in zip(products, biases, strict=True)] if biases else products
    whole = _gathered(hidden, group, length)
    return [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)]


@custom_op("ultrascale::column_products_backward", mutates_args=())
def column_products_backward(
    grads: list[Tensor], hidden: Tensor, weights: list[Tensor], group: str, length: int, want_weights: bool
) -> list[Tensor]:
    """Backward pass of `column_products`: dx and, if `want_weights`, dW of each weight."""
    ranks = group_named(group)
    gathered = all_gather_sequence(hidden, length, ranks) if length and want_weights else None
    grad = _sum_of_products(grads, weights)
    summed = sum_sequence(grad, length, ranks)
    weight_grads = []
    if want_weights:
        rows = (hidden if gathered is None else gathered()).flatten(0, 1)
        weight_grads = [torch.mm(grad.flatten(0, 1).t(), rows) for grad in grads]
    return [summed(), *weight_grads]


@custom_op("ultrascale::row_product", mutates_args=())
def row_product(inner: Tensor, weight: Tensor, group: str, length: int) -> Tensor:
    """Row-parallel product: [B, S, F] and weight [D, F] to the sum over ranks, [B, S/tp, D], or [B, S, D] where `length` is
    0."""
    ranks = group_named(group)
    if overlaps(inner, group, length, ranks.size()):
        return scattered_product(inner, weight, group)
    product = F.linear(inner, weight)
    return sum_sequence(product, length, ranks)()


@custom_op("ultrascale::gathered_sequence", mutates_args=())
def gathered_sequence(part: Tensor, group: str, length: int) -> Tensor:
    """All-gather: [B, S/tp, ...] of every rank to [B, S, ...]."""
    return all_gather_sequence(part, length, group_named(group))()


@custom_op("ultrascale::summed", mutates_args=())
def summed(whole: Tensor, group: str, length: int) -> Tensor:
    """Sum over ranks of [B, S, ...]: reduce-scattered to [B, S/tp, ...], or all-reduced where `length` is 0."""
    return sum_sequence(whole if length else whole.clone(), length, group_named(group))()


@column_products.register_fake
def _(hidden: Tensor, weights: list[Tensor], biases: list[Tensor], group: str, length: int) -> list[Tensor]:
    return [hidden.new_empty(hidden.shape[0], length or hidden.shape[1], len(weight)) for weight in weights]


@column_products_backward.register_fake
def _(grads: list[Tensor], hidden: Tensor, weights: list[Tensor], group: str, length: int, want_weights: bool) -> list[Tensor]:
    weight_grads = [torch.empty_like(weight) for weight in weights] if want_weights else []
    return [torch.empty_like(hidden, memory_format=torch.contiguous_format), *weight_grads]


@row_product.register_fake
def _(inner: Tensor, weight: Tensor, group: str, length: int) -> Tensor:
    return inner.new_empty(inner.shape[0], local_length(inner.shape[1], group, length), len(weight))


@gathered_sequence.register_fake
def _(part: Tensor, group: str, length: int) -> Tensor:
    return part.new_empty(part.shape[0], length, *part.shape[2:])


@summed.register_fake
def _(whole: Tensor, group: str, length: int) -> Tensor:
    return whole.new_empty(whole.shape[0], local_length(whole.shape[1], group, length), *whole.shape[2:])


_ops = torch.ops.ultrascale
PRODUCTS = (_ops.column_products.default, _ops.row_product.default, _ops.gathered_sequence.default, _ops.summed.default)
"""Operations whose results selective recomputation saves: recomputing them would communicate again."""


def local_length(length: int, group: str, is_cut: int) -> int:
    """Number of positions of a sequence of `length` that this rank has outside the products."""
    ranks = group_named(group)
    return even_part(length, ranks.size(), ranks.rank())[1] if is_cut else length


def _gathered(part: Tensor, group: str, length: int) -> Tensor:
    return all_gather_sequence(part, length, group_named(group))() if length else part


def _sum_of_products(grads: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Sum of g W, [B, S, D]."""
    first, *others = (grad.flatten(0, 1) for grad in grads)
    total = torch.mm(first, weights[0])
    for grad, weight in zip(others, weights[1:], strict=True):
        total.addmm_(grad, weight)
    return total.view(*grads[0].shape[:2], -1)


class Factor:
    """One factor of a weight's gradient: [B, S, F], or only this rank's positions and a function that gathers the others."""

    def __init__(self, local: Tensor, gather: Callable[[Tensor], Tensor] | None = None, gathered: Tensor | None = None):
        self.local, self.gather = local.detach(), gather  # without the graph that made it
        self._gathered = self.local if gather is None else gathered

    def rows(self) -> Tensor:
        """Rows [B S, F]. A gathered result is cached for the next product of the same factor."""
        if self._gathered is None:
            assert self.gather is not None
            self._gathered = self.gather(self.local)
        return self._gathered.flatten(0, -2)

    def keep_local(self) -> None:
        """Free the other ranks' positions until they are needed again."""
        if self.gather is not None:
            self._gathered = None


Defer = Callable[[Tensor, Factor, Factor], Tensor | None]


@dataclass
class TensorParallel:
    """The tp group and the length of the sequences that it shards. Its methods are called by the model's seams."""

    group: dist.ProcessGroup
    sequence_parallel: bool
    length: int = 0
    """Length of the current sequences; 0 without sequence parallelism, where they are not sharded."""
    defer: Defer | None = None
    """Function for split backward passes: takes a weight, the gradient of its product and the product's input, [B, S, F] and
    [B, S, D]; returns the weight's gradient, or None to compute it later (`pipeline_weights`)."""

    def column_linear(self, hidden: Tensor, *projections: torch.nn.Linear) -> tuple[Tensor, ...]:
        """Column-parallel projections of one input: [B, S/tp, D] to [B, S, F/tp] each."""
        weights = [projection.weight for projection in projections]
        biases = [projection.bias for projection in projections if projection.bias is not None]
        assert len(biases) in (0, len(weights)), "projections of one input all have a bias, or none"
        return _ColumnLinear.apply(self, len(weights), hidden, *weights, *biases)  # pyright: ignore

    def row_linear(self, inner: Tensor, projection: torch.nn.Linear) -> Tensor:
        """Row-parallel projection: [B, S, F/tp] to [B, S/tp, D]. The bias, replicated on every rank, is added once, to the
        sum."""
        out: Tensor = _RowLinear.apply(self, inner, projection.weight)  # pyright: ignore
        return out if projection.bias is None else out + projection.bias

    def gather_sequence(self, part: Tensor) -> Tensor:
        """All-gather [B, S/tp, ...] to [B, S, ...], of which every rank then uses its own heads: gradients are summed over
        ranks."""
        return _GatherSequence.apply(self.group.group_name, self.length, part)  # pyright: ignore

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """Sum over ranks of [B, S, D], scattered to [B, S/tp, D]."""
        return _ReduceScatterSequence.apply(self.group.group_name, self.length, whole)  # pyright: ignore

    def column_linear_to_sequence_shard(self, projection: torch.nn.Linear, hidden: Tensor) -> Tensor:
        """Column-parallel projection from one sequence shard to another: [B, S/tp, D] to [B, S/tp, F]."""
        (columns,) = self.column_linear(hidden, projection)  # [B, S, F/tp]
        width = projection.out_features
        first, count = even_part(width, self.group.size(), self.group.rank())
        return self.reduce_scatter(F.pad(columns, (first, width - first - count)))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight, where each rank has an equal part of the last dimension (or ranks hold identical copies)."""
        return _ShardedRMSNorm.apply(self.group.group_name, self.group.size(), x, weight, eps)  # pyright: ignore

    def sequence_shard(self, hidden: Tensor) -> Tensor:
        """This rank's shard of the positions of [B, S, ...]."""
        if not self.length:
            return hidden
        first, count = even_part(hidden.shape[1], self.group.size(), self.group.rank())
        return hidden[:, first : first + count]


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, count: int, hidden: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.weights, biases = list(parameters[:count]), list(parameters[count:])
        ctx.save_for_backward(hidden)
        ctx.tp, ctx.length, ctx.has_bias = tp, tp.length, bool(biases)
        return tuple(column_products(hidden, ctx.weights, biases, tp.group.group_name, tp.length))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), group, defer = ctx.saved_tensors, ctx.tp.group.group_name, ctx.tp.defer
        defer = None if torch.compiler.is_compiling() else defer
        immediately = defer is None
        of_input, *of_weights = column_products_backward(list(grads), hidden, ctx.weights, group, ctx.length, immediately)
        if defer is not None:
            input_factor = Factor(hidden, _gather_later(group, ctx.length))
            of_weights = [defer(weight, Factor(grad), input_factor) for weight, grad in zip(ctx.weights, grads, strict=True)]
        of_biases = [grad.flatten(0, 1).sum(0) for grad in grads] if ctx.has_bias else []
        return None, None, of_input, *of_weights, *of_biases


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, inner: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.tp, ctx.length, ctx.weight = tp, tp.length, weight
        return row_product(inner, weight, tp.group.group_name, tp.length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inner,), group, defer = ctx.saved_tensors, ctx.tp.group.group_name, ctx.tp.defer
        of_inner = None
        if overlaps(grads[0], group, ctx.length, ctx.tp.group.size()):
            whole, (of_inner,) = gathered_products(grads[0], [ctx.weight.t()], group)
        else:
            whole = gathered_sequence(grads[0], group, ctx.length) if ctx.length else grads[0]
        if defer is None or torch.compiler.is_compiling():
            of_weight = torch.mm(whole.flatten(0, 1).t(), inner.flatten(0, 1))
        else:
            of_weight = defer(ctx.weight, Factor(grads[0], _gather_later(group, ctx.length), whole), Factor(inner))
        return None, torch.matmul(whole, ctx.weight) if of_inner is None else of_inner, of_weight


def _gather_later(group: str, length: int) -> Callable[[Tensor], Tensor] | None:
    return partial(gathered_sequence, group=group, length=length) if length else None


class _ShardedRMSNorm(torch.autograd.Function):
    """RMSNorm of `kernels.norm` with two sums over ranks: of squares, and in the backward pass of the gradient's projection on
    the normed input. Saves x, the weight, and one number per row, as that one does."""

    @staticmethod
    def forward(ctx: Any, group: str, size: int, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()  # [B, S, 1]
        inverse_rms = summed(squares, group, 0).div(size * x.shape[-1]).add_(eps).rsqrt_()  # recomputation keeps the sum
        ctx.save_for_backward(x, weight, inverse_rms)
        ctx.group, ctx.width = group, size * x.shape[-1]
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad, wide = at_least_fp32(grads[0]), at_least_fp32(x)
        normed = wide * inverse_rms
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad * weight
        along = summed(torch.linalg.vecdot(grad_normed, normed).unsqueeze(-1), ctx.group, 0).div_(-ctx.width)
        return None, None, grad_normed.addcmul_(normed, along).mul_(inverse_rms).to(x.dtype), grad_weight, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, length: int, part: Tensor) -> Tensor:
        ctx.group, ctx.length = group, length
        return gathered_sequence(part, group, length) if length else part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, summed(grads[0], ctx.group, ctx.length)


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: str, length: int, whole: Tensor) -> Tensor:
        ctx.group, ctx.length = group, length
        return summed(whole, group, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, gathered_sequence(grads[0], ctx.group, ctx.length) if ctx.length else grads[0]
