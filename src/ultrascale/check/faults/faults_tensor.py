"""Faults of tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.check.faults.plants import plants
from ultrascale.parallel.share import Share
from ultrascale.parallel.tensor import tensor_loss, tensor_ops
from ultrascale.train.trainer import Trainer
from ultrascale.work.sharding.places import even_part


def _seams(trainer: Trainer, seam: str) -> list[tuple[Any, Any]]:
    """Every module with a seam, and the function that fills it."""
    modules = [module for stage in trainer.share.stages.values() for module in stage.modules()]
    return [(module, getattr(module, seam)) for module in modules if seam in vars(module)]


def _refilled(trainer: Trainer, seam: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which `other(current function)` fills every such seam."""
    filled = _seams(trainer, seam)
    for module, function in filled:
        setattr(module, seam, other(function))
    yield
    for module, function in filled:
        setattr(module, seam, function)


def _local_slice(whole: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """This rank's positions of a tensor that should have been reduced first."""
    first, length = even_part(whole.shape[1], group.size(), group.rank())
    return lambda: whole[:, first : first + length].contiguous()


@plants("tp-sum-missing")
def _sum_missing(trainer: Trainer) -> Iterator[None]:
    class Alone(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor, local_out: Tensor) -> Tensor:
            return local_out.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0], None

    def alone(row_linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
        tp = row_linear.__self__  # pyright: ignore[reportFunctionMemberAccess]

        def call(inner: Tensor, projection: torch.nn.Linear) -> Tensor:
            local_out = torch.nn.functional.linear(inner.detach(), projection.weight.detach(), projection.bias)
            local_out = _local_slice(local_out, tp.group)() if tp.length else local_out
            return Alone.apply(row_linear(inner, projection), local_out)  # pyright: ignore[reportReturnType]

        return call

    yield from _refilled(trainer, "row_linear", alone)


@plants("tp-input-gradient")
def _input_gradient(trainer: Trainer) -> Iterator[None]:
    backward = tensor_ops._ColumnLinear.backward

    def alone(ctx: Any, *grads: Tensor) -> Any:
        nothing, count, of_input, *others = backward(ctx, *grads)
        whole = tensor_ops._sum_of_products(list(grads), ctx.weights)
        of_input = _local_slice(whole, ctx.tp.group)() if ctx.length else whole
        return nothing, count, of_input, *others

    with patch.object(tensor_ops._ColumnLinear, "backward", staticmethod(alone)):
        yield


@plants("tp-input-gradient-twice")
def _input_gradient_twice(trainer: Trainer) -> Iterator[None]:
    backward, ranks = tensor_ops._ColumnLinear.backward, trainer.run.layout.tp

    def doubled(ctx: Any, *grads: Tensor) -> Any:
        nothing, count, of_input, *others = backward(ctx, *grads)
        assert of_input is not None
        return nothing, count, of_input * ranks, *others

    with patch.object(tensor_ops._ColumnLinear, "backward", staticmethod(doubled)):
        yield


@plants("tp-bias-everywhere")
def _bias_everywhere(trainer: Trainer) -> Iterator[None]:
    def heavy(row_linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
        extra = trainer.run.layout.tp - 1

        def call(inner: Tensor, projection: torch.nn.Linear) -> Tensor:
            out = row_linear(inner, projection)
            return out if projection.bias is None else out + extra * projection.bias

        return call

    with torch.no_grad():  # biases begin at zero, where it makes no difference
        for shard in trainer.share.local_parameters:
            if shard.name.endswith(("down_proj.bias", "o_proj.bias")):
                shard.parameter.add_(0.01)
    yield from _refilled(trainer, "row_linear", heavy)


@plants("tp-vocabulary-offset")
def _vocabulary_offset(trainer: Trainer) -> Iterator[None]:
    def shifted(length: int, parts: int, part: int) -> tuple[int, int]:
        first, size = even_part(length, parts, part)
        return first + min(part, 1), size

    with patch.object(tensor_loss, "even_part", shifted):
        yield


@plants("tp-normaliser")
def _normaliser(trainer: Trainer) -> Iterator[None]:
    join, extra = tensor_loss._join, torch.tensor(float(trainer.run.layout.tp)).log().double()

    def high(ranks: Tensor) -> tuple[Tensor, Tensor]:
        normalizer, losses = join(ranks)
        return normalizer + extra, losses + extra

    with patch.object(tensor_loss, "_join", high):
        yield


@plants("tp-copies")
def _copies(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_sum_copies", lambda share: None):
        yield


@plants("tp-copies-twice")
def _copies_twice(trainer: Trainer) -> Iterator[None]:
    shards, mesh, tp = trainer.share.local_parameters, trainer.share.mesh, trainer.run.layout.tp
    known, whole = mesh.neighbours, mesh.group("tp")  # a right run has no group of copies here
    trainer.share.local_parameters = [
        shard._replace(weight_shard=shard.weight_shard._replace(is_partial=shard.weight_shard.num_tp_copies > 1))
        for shard in shards
    ]
    with patch.object(mesh, "neighbours", lambda count: whole if count == tp else known(count)):
        yield
    trainer.share.local_parameters = shards


@plants("tp-key-heads")
def _key_heads(trainer: Trainer) -> Iterator[None]:
    shards, heads = trainer.share.local_parameters, ("k_proj.weight", "v_proj.weight")
    trainer.share.local_parameters = [
        shard._replace(
            weight_shard=shard.weight_shard._replace(
                is_partial=shard.weight_shard.is_partial and not shard.name.endswith(heads)
            )
        )
        for shard in shards
    ]
    yield
    trainer.share.local_parameters = shards


@plants("tp-shared-key")
def _shared_key(trainer: Trainer) -> Iterator[None]:
    def alone(ctx: Any, *grads: Tensor) -> Any:
        group = tensor_ops.group_named(ctx.group)
        return None, None, _local_slice(grads[0], group)() if ctx.length else grads[0]

    with patch.object(tensor_ops._GatherSequence, "backward", staticmethod(alone)):
        yield


@plants("tp-positions")
def _positions(trainer: Trainer) -> Iterator[None]:
    group = trainer.share.mesh.group("tp")
    assert group is not None

    def of_next(group: dist.ProcessGroup, hidden: Tensor) -> Tensor:
        return _local_slice(hidden.roll(1, dims=1), group)()

    stages = [(stage, stage.sequence_shard) for stage in trainer.share.stages.values()]
    for stage, _ in stages:
        stage.sequence_shard = partial(of_next, group)
    yield
    for stage, share in stages:
        stage.sequence_shard = share
