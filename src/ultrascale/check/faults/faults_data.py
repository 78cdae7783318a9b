"""Faults of data parallelism and accumulation: gradients that are summed over too few, too many, or the wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ultrascale.check.faults.table import Plant
from ultrascale.check.faults.table import micro_batches as count_micro_batches
from ultrascale.parallel.data.collectives import DirectReduceScatter
from ultrascale.parallel.data.data_parallel import sharded_modules
from ultrascale.schedules.actions import Action, Kind
from ultrascale.torch_private import buckets_of_module
from ultrascale.train.trainer import Trainer


def _scattered_alone(
    reduce: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
) -> None:
    """Keep this rank's own part, without reducing over the others."""
    output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _is_bucket(tensor: Any) -> bool:
    """True for FSDP2's flat gradient bucket: 1-d, floating point, and longer than the few numbers that ranks agree on."""
    return isinstance(tensor, Tensor) and tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() > 16


def _all_reduce(change: Callable[[Tensor], Any], *, skips: bool) -> Plant:
    """Context manager that patches `dist.all_reduce`: `change` is applied to each gradient bucket of FSDP2 in place, after its
    all-reduce, or instead of it if `skips`."""
    original = dist.all_reduce

    def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        result = None if skips and _is_bucket(tensor) else original(tensor, *arguments, **options)
        if _is_bucket(tensor):
            change(tensor)
        return result

    return patch.object(dist, "all_reduce", call)


@contextmanager
def _missing_reduce(trainer: Trainer) -> Iterator[None]:
    with _all_reduce(lambda tensor: None, skips=True), patch.object(DirectReduceScatter, "__call__", _scattered_alone):
        yield


def _missing_scatter(trainer: Trainer) -> Plant:
    return patch.object(DirectReduceScatter, "__call__", _scattered_alone)


def _missing_replicas(trainer: Trainer) -> Plant:
    return _all_reduce(lambda tensor: None, skips=True)


def _reduced_twice(trainer: Trainer) -> Plant:
    ranks = trainer.run.layout.group("replicate")[0]
    return _all_reduce(lambda tensor: tensor.mul_(ranks), skips=False)


def _averaged(trainer: Trainer) -> Plant:
    finish, ranks = trainer.share.finish_gradients, trainer.run.layout.dp * trainer.run.layout.cp

    def divided() -> None:
        for parameter in trainer.share.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(ranks)
        finish()

    return patch.object(trainer.share, "finish_gradients", divided)


def _accumulation_reset(trainer: Trainer) -> Plant:
    on_action = trainer.passes.on_action

    def forget(action: Action) -> None:
        if action.kind is Kind.BACKWARD:
            for stage in trainer.share.stages.values():
                _forget(stage)
            trainer.optimizer.zero_grad(set_to_none=True)
        on_action(action)

    return patch.object(trainer.passes, "on_action", forget)


def _forget(stage: Any) -> None:
    """Drop gradients that FSDP2 has accumulated but not reduced, or reduced but not yet summed over replicas."""
    for module in sharded_modules(stage):
        for group in buckets_of_module(module):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None


def _moving_average(trainer: Trainer) -> Plant:
    train, count = trainer.passes.train, count_micro_batches(trainer.run)

    def scaled(micro_batches: Any, num_targets: int) -> Any:
        return train(micro_batches, num_targets * count)

    return patch.object(trainer.passes, "train", scaled)
