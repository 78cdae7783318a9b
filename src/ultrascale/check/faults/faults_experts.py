"""Faults of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.check.faults.table import Plant
from ultrascale.models.experts import GroupedLinear, RoutingStatistics, moe_layers
from ultrascale.parallel.expert import expert_dispatch
from ultrascale.parallel.share import local
from ultrascale.train import passes
from ultrascale.train.trainer import Trainer


def _after_backward(trainer: Trainer, change: Callable[[Tensor], Any]) -> Plant:
    """Call `change` on each expert weight's gradient before gradients are reduced."""
    finish = trainer.share.finish_gradients

    def changed() -> None:
        for shard in trainer.share.local_parameters:
            if shard.weight.is_expert and shard.parameter.grad is not None:
                change(local(shard.parameter.grad))
        finish()

    return patch.object(trainer.share, "finish_gradients", changed)


def _expert_gradients_doubled(trainer: Trainer) -> Plant:
    return _after_backward(trainer, lambda gradient: gradient.mul_(trainer.run.layout.ep))


def _expert_gradients_mixed(trainer: Trainer) -> Plant:
    group = trainer.share.mesh.group("ep")
    return _after_backward(trainer, lambda gradient: dist.all_reduce(gradient, group=group))


def _expert_gradients_averaged(trainer: Trainer) -> Plant:
    # What a rank alone had is gone after the sum; the mean over ranks is as wrong.
    return _after_backward(trainer, lambda gradient: gradient.div_(trainer.run.layout.expert_dp))


def _router_detached(trainer: Trainer) -> Plant:
    weighted_sum = expert_dispatch.weighted_sum

    def detached(rows: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(rows, pairs, weights.detach())

    return patch.object(expert_dispatch, "weighted_sum", detached)


def _expert_rows_unsorted(trainer: Trainer) -> Plant:
    return patch.object(expert_dispatch, "put_back", lambda rows, order: rows)


@contextmanager
def _expert_bias_everywhere(trainer: Trainer) -> Iterator[None]:
    modules = [module for stage in trainer.share.stages.values() for module in stage.modules()]
    quiet = [module for module in modules if isinstance(module, GroupedLinear) and not module.adds_bias]
    with torch.no_grad():  # biases begin at zero, where it makes no difference
        for shard in trainer.share.local_parameters:
            if shard.weight.is_expert and shard.name.endswith("down_proj.bias"):
                local(shard.parameter).add_(0.01)
    for module in quiet:
        module.adds_bias = True
    yield
    for module in quiet:
        module.adds_bias = False


def _router_counts_overwritten(trainer: Trainer) -> Plant:
    def overwrite(statistics: RoutingStatistics, counts: Tensor, auxiliary: Tensor | None) -> None:
        statistics.counts, statistics.auxiliary = counts, auxiliary

    return patch.object(RoutingStatistics, "add", overwrite)


def _router_counts_twice(trainer: Trainer) -> Plant:
    add = RoutingStatistics.add

    def twice(statistics: RoutingStatistics, counts: Tensor, auxiliary: Tensor | None) -> None:
        add(statistics, counts, auxiliary)
        add(statistics, counts, None)

    return patch.object(RoutingStatistics, "add", twice)


def _expert_bias_local(trainer: Trainer) -> Plant:
    apply = trainer.apply

    def alone(gradients: Any) -> Any:
        with patch.object(type(trainer.ranks), "sum", lambda ranks, values: values):
            return apply(gradients)

    return patch.object(trainer, "apply", alone)


def _auxiliary_scale(trainer: Trainer) -> Plant:
    scale = passes.scale_auxiliary_losses
    ranks = trainer.run.layout.tp * trainer.run.layout.cp

    return patch.object(passes, "scale_auxiliary_losses", lambda stage, factor: scale(stage, factor * ranks))


@contextmanager
def _auxiliary_counts(trainer: Trainer) -> Iterator[None]:
    layers = [layer for stage in trainer.share.stages.values() for _, layer in moe_layers(stage)]
    before = [layer.router.sum_counts for layer in layers]
    for layer in layers:
        layer.router.sum_counts = lambda counts: counts
    yield
    for layer, sums in zip(layers, before, strict=True):
        layer.router.sum_counts = sums
