"""Faults of data parallelism and accumulation: gradients that are summed over too few, too many, or the wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from ultrascale.check.faults.fault import Home, fault
from ultrascale.description.run import Run
from ultrascale.parallel.data.collectives import DirectReduceScatter
from ultrascale.parallel.data.data_parallel import sharded_modules
from ultrascale.schedules.actions import Action, Kind
from ultrascale.torch_private import own_buckets
from ultrascale.train.trainer import Trainer


def _reduces(run: Run) -> bool:
    return run.layout.dp * run.layout.cp > 1


def _repeats(run: Run) -> bool:
    """True if gradients are all-reduced over replicas: hybrid sharding (HSDP), or unsharded data parallelism."""
    return run.layout.group("replicate")[0] > 1


def _cuts(run: Run) -> bool:
    return run.layout.group("shard")[0] > 1


def _scattered_alone(
    reduce: Any, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
) -> None:
    """This rank's own part, without the others'."""
    output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def _is_bucket(tensor: Any) -> bool:
    """True for FSDP2's flat gradient bucket: 1-d, floating point, and longer than the few numbers that ranks agree on."""
    return isinstance(tensor, Tensor) and tensor.dim() == 1 and tensor.is_floating_point() and tensor.numel() > 16


def _all_reduce(change: Callable[[Tensor], Any], *, skips: bool) -> Any:
    """Context manager that patches `dist.all_reduce`: `change` is applied to each gradient bucket of FSDP2 in place, after its
    all-reduce, or instead of it if `skips`."""
    original = dist.all_reduce

    def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        result = None if skips and _is_bucket(tensor) else original(tensor, *arguments, **options)
        if _is_bucket(tensor):
            change(tensor)
        return result

    return patch.object(dist, "all_reduce", call)


@fault("missing-reduce", "gradients are never summed over the ranks (picotron: cp > 1 at dp = 1)", needs="dp or cp > 1",
       fits=_reduces, home=Home(layout={"dp": 2}))  # fmt: skip
def _missing_reduce(trainer: Trainer) -> Iterator[None]:
    with _all_reduce(lambda tensor: None, skips=True), patch.object(DirectReduceScatter, "__call__", _scattered_alone):
        yield


@fault("missing-scatter", "gradients are summed over copies of the state, but not over the ranks that cut it",
       needs="a ZeRO stage", fits=_cuts, home=Home(layout={"dp": 2, "zero_stage": 2}))  # fmt: skip
def _missing_scatter(trainer: Trainer) -> Iterator[None]:
    with patch.object(DirectReduceScatter, "__call__", _scattered_alone):
        yield


@fault("missing-replicas", "gradients are summed over the ranks that cut the state, but not over its copies",
       needs="copies of the state", fits=_repeats,
       home=Home(layout={"dp": 4, "dp_shard": 2, "zero_stage": 1}))  # fmt: skip
def _missing_replicas(trainer: Trainer) -> Iterator[None]:
    with _all_reduce(lambda tensor: None, skips=True):
        yield


@fault("reduced-twice", "gradients that are whole are summed over the ranks once more (DeepSpeed#7718, Megatron#7160)",
       needs="copies of the state", fits=_repeats, home=Home(layout={"dp": 2}))  # fmt: skip
def _reduced_twice(trainer: Trainer) -> Iterator[None]:
    ranks = trainer.run.layout.group("replicate")[0]
    with _all_reduce(lambda tensor: tensor.mul_(ranks), skips=False):
        yield


@fault("averaged", "gradients of sums are averaged over the ranks, as FSDP2 does unless told", needs="dp or cp > 1",
       fits=_reduces, home=Home(layout={"dp": 2, "zero_stage": 3}))  # fmt: skip
def _averaged(trainer: Trainer) -> Iterator[None]:
    finish, ranks = trainer.share.finish_gradients, trainer.run.layout.dp * trainer.run.layout.cp

    def divided() -> None:
        for parameter in trainer.share.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(ranks)
        finish()

    with patch.object(trainer.share, "finish_gradients", divided):
        yield


@fault("accumulation-reset", "only the last micro-batch's gradient is kept (Fast-LLM#550)", needs="several micro-batches",
       fits=lambda run: _reduces(run) and _micro_batches(run) > 1 and run.layout.pp == 1,
       home=Home(layout={"dp": 2, "zero_stage": 2}))  # fmt: skip
def _accumulation_reset(trainer: Trainer) -> Iterator[None]:
    told = trainer.passes.on_action

    def forget(action: Action) -> None:
        if action.kind is Kind.BACKWARD:
            for stage in trainer.share.stages.values():
                _forget(stage)
            trainer.optimizer.zero_grad(set_to_none=True)
        told(action)

    with patch.object(trainer.passes, "on_action", forget):
        yield


def _forget(stage: Any) -> None:
    """Drop what FSDP2 has accumulated before it is reduced, or reduced and not yet summed over copies."""
    for module in sharded_modules(stage):
        for group in own_buckets(module):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None


def _micro_batches(run: Run) -> int:
    return run.batch.sequences_per_batch // (run.layout.dp * run.layout.micro_batch_size)


@fault("moving-average", "each micro-batch divides what was accumulated before (torchtitan#1733, torch's scale_grads)",
       needs="several micro-batches", fits=lambda run: run.layout.world_size > 1 and _micro_batches(run) > 1,
       home=Home(layout={"pp": 2}))  # fmt: skip
def _moving_average(trainer: Trainer) -> Iterator[None]:
    train, count = trainer.passes.train, _micro_batches(trainer.run)

    def scaled(micro_batches: Any, num_targets: int) -> Any:
        return train(micro_batches, num_targets * count)

    with patch.object(trainer.passes, "train", scaled):
        yield
