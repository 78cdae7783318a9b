"""Faults of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ultrascale.check.faults.plants import plants
from ultrascale.parallel.pipeline import pipeline_passes
from ultrascale.parallel.pipeline.pipeline_passes import Passing
from ultrascale.parallel.pipeline.pipeline_weights import Waiting
from ultrascale.parallel.share import TIED, Share, local
from ultrascale.schedules.actions import Action
from ultrascale.train.trainer import Trainer


@plants("pp-order")
def _order(trainer: Trainer) -> Iterator[None]:
    train = trainer.passes.train

    def reordered(micro_batches: Any, num_targets: int) -> Any:
        rotated = [*micro_batches[1:], micro_batches[0]]
        mixed = [replace(batch, targets=other.targets) for batch, other in zip(micro_batches, rotated, strict=True)]
        return train(mixed, num_targets)

    with patch.object(trainer.passes, "train", reordered):
        yield


@plants("pp-gradient-dropped")
def _gradient_dropped(trainer: Trainer) -> Iterator[None]:
    backward = Passing._backward

    def dropping(passing: Passing, part: Action, gradient: Tensor | None) -> Tensor | None:
        input_gradient = backward(passing, part, gradient)
        return torch.zeros_like(input_gradient) if input_gradient is not None and part.micro_batch == 0 else input_gradient

    with patch.object(Passing, "_backward", dropping):
        yield


@plants("pp-documents")
def _documents(trainer: Trainer) -> Iterator[None]:
    forward = trainer.passes.forward

    def blind(batch: Any, *, stage: int = 0, received: Tensor | None = None) -> Tensor:
        masked = batch if stage == 0 else replace(batch, document_ids=torch.zeros_like(batch.document_ids))
        return forward(masked, stage=stage, received=received)

    with patch.object(trainer.passes, "forward", blind):
        yield


@plants("pp-tied")
def _tied(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_sum_tied", lambda share: None):
        yield


@plants("pp-tied-twice")
def _tied_twice(trainer: Trainer) -> Iterator[None]:
    sum_tied = Share._sum_tied

    def twice(share: Share) -> None:
        sum_tied(share)
        sum_tied(share)

    with patch.object(Share, "_sum_tied", twice):
        yield


@plants("pp-tied-updated-twice")
def _tied_updated_twice(trainer: Trainer) -> Iterator[None]:
    update = trainer.update

    def twice(norm: float) -> float:
        ends = [shard.parameter for shard in trainer.share.local_parameters if shard.name == TIED and shard.is_second]
        before = [local(parameter).detach().clone() for parameter in ends]
        rate = update(norm)
        with torch.no_grad():
            for parameter, old in zip(ends, before, strict=True):
                local(parameter).add_(local(parameter) - old)
        return rate

    with patch.object(trainer, "update", twice):
        yield


@plants("pp-weights-dropped")
def _weights_dropped(trainer: Trainer) -> Iterator[None]:
    make = pipeline_passes.make_gradients

    def forgetful(waiting: Waiting) -> None:
        make(waiting[:-1])

    with patch.object(pipeline_passes, "make_gradients", forgetful):
        yield


@plants("pp-mirror")
def _mirror(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_sum_mirrors", lambda share: None):
        yield


@plants("pp-mirror-twice")
def _mirror_twice(trainer: Trainer) -> Iterator[None]:
    sum_mirrors = Share._sum_mirrors

    def twice(share: Share) -> None:
        sum_mirrors(share)
        sum_mirrors(share)

    with patch.object(Share, "_sum_mirrors", twice):
        yield


@plants("pp-mirror-drifts")
def _mirror_drifts(trainer: Trainer) -> Iterator[None]:
    sum_mirrors = Share._sum_mirrors

    def leave_mirrors_apart(share: Share) -> None:
        gradients = [
            None if shard.parameter.grad is None else local(shard.parameter.grad).clone() for shard in share.local_parameters
        ]
        sum_mirrors(share)
        for shard, gradient in zip(share.local_parameters, gradients, strict=True):
            if share.mirror < share.mesh.coordinates.pp and shard.parameter.grad is not None:
                local(shard.parameter.grad).copy_(torch.zeros(()) if gradient is None else gradient)

    with patch.object(Share, "_sum_mirrors", leave_mirrors_apart):
        yield


@plants("norm-of-mirrors")
def _norm_of_mirrors(trainer: Trainer) -> Iterator[None]:
    with patch.object(Share, "_counts", lambda share, shard: not shard.is_second and not shard.weight_shard.tp_copy):
        yield
