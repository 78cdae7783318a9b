"""Faults of a step as a whole: wrong sequences, wrong divisor, wrong clipping norm, wrong number of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ultrascale.check.faults.table import Plant
from ultrascale.description.progress import StepSpan
from ultrascale.parallel.share import TIED, LocalParameter, Share, local
from ultrascale.train.trainer import Trainer


def _mean_of_means(trainer: Trainer) -> Plant:
    agree, ranks = trainer.agree_on_targets, trainer.run.layout.dp * trainer.run.layout.cp

    def local_target_count(micro_batches: Any) -> int:
        agree(micro_batches)
        return sum(batch.num_targets for batch in micro_batches) * ranks

    return patch.object(trainer, "agree_on_targets", local_target_count)


def _shifted_batch(trainer: Trainer) -> Plant:
    read = trainer.read_micro_batches

    def shifted(span: StepSpan) -> Any:
        shift = trainer.run.layout.micro_batch_size if trainer.share.mesh.coordinates.dp == 1 else 0
        return read(StepSpan(span.first_sequence + shift, span.num_sequences))

    return patch.object(trainer, "read_micro_batches", shifted)


def _counted_twice(trainer: Trainer) -> Plant:
    train = trainer.passes.train

    def doubled(*arguments: Any) -> list[Tensor]:
        losses = train(*arguments)
        for shard in trainer.share.local_parameters:
            if shard.name == TIED and shard.parameter.grad is not None:
                local(shard.parameter.grad).mul_(2)
        return losses

    return patch.object(trainer.passes, "train", doubled)


def _local_clip(trainer: Trainer) -> Plant:
    update = trainer.update

    def clipped(norm: float) -> float:
        local_gradients = [
            local(shard.parameter.grad) for shard in trainer.share.local_parameters if shard.parameter.grad is not None
        ]
        return update(float(torch.stack([gradient.norm() for gradient in local_gradients]).norm()))

    return patch.object(trainer, "update", clipped)


def _counting(counts: Callable[[Share, LocalParameter], bool]) -> Plant:
    return patch.object(Share, "_counts", counts)


def _norm_overcount(trainer: Trainer) -> Plant:
    return _counting(lambda share, shard: not shard.is_second)


def _norm_of_replicas(trainer: Trainer) -> Plant:
    return _counting(lambda share, shard: not shard.is_second and not shard.weight_shard.tp_copy)


def _tied_norm_twice(trainer: Trainer) -> Plant:
    counts = Share._counts
    return _counting(lambda share, shard: counts(share, shard._replace(is_second=False)))


def _norm_without_experts(trainer: Trainer) -> Plant:
    counts = Share._counts
    return _counting(lambda share, shard: counts(share, shard) and not shard.weight.is_expert)


def _norm_without_sinks(trainer: Trainer) -> Plant:
    counts = Share._counts
    return _counting(lambda share, shard: counts(share, shard) and not shard.name.endswith("sinks"))


def _initial_weights(trainer: Trainer) -> Plant:
    shard = next(shard for shard in trainer.share.local_parameters if shard.name.endswith("_proj.weight"))
    if trainer.ranks.rank == trainer.ranks.world - 1:
        with torch.no_grad():
            local(shard.parameter).copy_(local(shard.parameter).flip(0))
    return nullcontext()


def _stale_copy(trainer: Trainer) -> Plant:
    compute, previous = trainer.compute_gradients, [_values(trainer)]

    def stale() -> Any:
        current = _values(trainer)
        _set(trainer, previous.pop())
        result = compute()
        _set(trainer, current)
        previous.append(current)
        return result

    return patch.object(trainer, "compute_gradients", stale)


def _drifting_replica(trainer: Trainer) -> Plant:
    update = trainer.update

    def rounded(norm: float) -> float:
        rate = update(norm)
        if trainer.ranks.rank == trainer.ranks.world - 1:
            with torch.no_grad():
                local(trainer.share.local_parameters[-1].parameter).mul_(1 + 1e-14)
        return rate

    return patch.object(trainer, "update", rounded)


@contextmanager
def _decayed_norms(trainer: Trainer) -> Iterator[None]:
    groups = trainer.optimizer.param_groups
    before = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = max(before)
    yield
    for group, decay in zip(groups, before, strict=True):
        group["weight_decay"] = decay


def _step_forgotten(trainer: Trainer) -> Plant:
    update = trainer.update

    def forgetful(norm: float) -> float:
        for state in trainer.optimizer.state.values():
            state["step"].zero_()
        return update(norm)

    return patch.object(trainer, "update", forgetful)


def _values(trainer: Trainer) -> list[Tensor]:
    return [local(shard.parameter).detach().clone() for shard in trainer.share.local_parameters]


@torch.no_grad()
def _set(trainer: Trainer, values: list[Tensor]) -> None:
    for shard, value in zip(trainer.share.local_parameters, values, strict=True):
        local(shard.parameter).copy_(value)
