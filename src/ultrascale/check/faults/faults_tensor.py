"""Faults of tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.check.faults.table import Plant
from ultrascale.parallel.share import LocalParameter, Share
from ultrascale.parallel.tensor import tensor_loss, tensor_ops
from ultrascale.train.trainer import Trainer
from ultrascale.work.sharding.places import even_part


@contextmanager
def _refilled(trainer: Trainer, other: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which `other(current function)` fills every seam for row-parallel products."""
    modules = [module for stage in trainer.share.stages.values() for module in stage.modules() if "row_linear" in vars(module)]
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "row_linear", other(module.row_linear)))
        yield


def _local_slice(whole: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """This rank's positions of a tensor that should have been reduced first."""
    first, length = even_part(whole.shape[1], group.size(), group.rank())
    return lambda: whole[:, first : first + length].contiguous()


def _tp_sum_missing(trainer: Trainer) -> Plant:
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

    return _refilled(trainer, alone)


def _tp_input_gradient(trainer: Trainer) -> Plant:
    backward = tensor_ops._ColumnLinear.backward

    def alone(ctx: Any, *grads: Tensor) -> Any:
        nothing, count, of_input, *others = backward(ctx, *grads)
        whole = tensor_ops._sum_of_products(list(grads), ctx.weights)
        of_input = _local_slice(whole, ctx.tp.group)() if ctx.length else whole
        return nothing, count, of_input, *others

    return patch.object(tensor_ops._ColumnLinear, "backward", staticmethod(alone))


def _tp_input_gradient_twice(trainer: Trainer) -> Plant:
    backward, ranks = tensor_ops._ColumnLinear.backward, trainer.run.layout.tp

    def doubled(ctx: Any, *grads: Tensor) -> Any:
        nothing, count, of_input, *others = backward(ctx, *grads)
        assert of_input is not None
        return nothing, count, of_input * ranks, *others

    return patch.object(tensor_ops._ColumnLinear, "backward", staticmethod(doubled))


def _tp_bias_everywhere(trainer: Trainer) -> Plant:
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
    return _refilled(trainer, heavy)


def _tp_vocabulary_offset(trainer: Trainer) -> Plant:
    def shifted(length: int, parts: int, part: int) -> tuple[int, int]:
        first, size = even_part(length, parts, part)
        return first + min(part, 1), size

    return patch.object(tensor_loss, "even_part", shifted)


def _tp_normaliser(trainer: Trainer) -> Plant:
    join, extra = tensor_loss._join, torch.tensor(float(trainer.run.layout.tp)).log().double()

    def high(ranks: Tensor) -> tuple[Tensor, Tensor]:
        normalizer, losses = join(ranks)
        return normalizer + extra, losses + extra

    return patch.object(tensor_loss, "_join", high)


def _tp_copies(trainer: Trainer) -> Plant:
    return patch.object(Share, "_sum_copies", lambda share: None)


def _weight_shards(share: Share, is_partial: Callable[[LocalParameter], bool]) -> Plant:
    """Context in which `is_partial` says of which parameters a rank has only a partial gradient."""
    shards = [
        shard._replace(weight_shard=shard.weight_shard._replace(is_partial=is_partial(shard)))
        for shard in share.local_parameters
    ]
    return patch.object(share, "local_parameters", shards)


@contextmanager
def _tp_copies_twice(trainer: Trainer) -> Iterator[None]:
    share, mesh, tp = trainer.share, trainer.share.mesh, trainer.run.layout.tp
    known, whole = mesh.neighbours, mesh.group("tp")  # a right run has no group of copies here
    with (
        _weight_shards(share, lambda shard: shard.weight_shard.num_tp_copies > 1),
        patch.object(mesh, "neighbours", lambda count: whole if count == tp else known(count)),
    ):
        yield


def _tp_key_heads(trainer: Trainer) -> Plant:
    heads = ("k_proj.weight", "v_proj.weight")
    return _weight_shards(trainer.share, lambda shard: shard.weight_shard.is_partial and not shard.name.endswith(heads))


def _tp_shared_key(trainer: Trainer) -> Plant:
    def alone(ctx: Any, *grads: Tensor) -> Any:
        group = tensor_ops.group_named(ctx.group)
        return None, None, _local_slice(grads[0], group)() if ctx.length else grads[0]

    return patch.object(tensor_ops._GatherSequence, "backward", staticmethod(alone))


@contextmanager
def _tp_positions(trainer: Trainer) -> Iterator[None]:
    group = trainer.share.mesh.group("tp")
    assert group is not None

    def of_next(group: dist.ProcessGroup, hidden: Tensor) -> Tensor:
        return _local_slice(hidden.roll(1, dims=1), group)()

    with ExitStack() as stack:
        for stage in trainer.share.stages.values():
            stack.enter_context(patch.object(stage, "sequence_shard", partial(of_next, group)))
        yield
