"""Faults of pipeline parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ultrascale.check.faults.table import Plant
from ultrascale.parallel.pipeline import pipeline_passes
from ultrascale.parallel.pipeline.pipeline_passes import Passing
from ultrascale.parallel.pipeline.pipeline_weights import Waiting
from ultrascale.parallel.share import TIED, Share, local
from ultrascale.schedules.actions import Action
from ultrascale.train.trainer import Trainer


def _pp_order(trainer: Trainer) -> Plant:
    train = trainer.passes.train

    def reordered(micro_batches: Any, num_targets: int) -> Any:
        rotated = [*micro_batches[1:], micro_batches[0]]
        mixed = [replace(batch, targets=other.targets) for batch, other in zip(micro_batches, rotated, strict=True)]
        return train(mixed, num_targets)

    return patch.object(trainer.passes, "train", reordered)


def _pp_gradient_dropped(trainer: Trainer) -> Plant:
    backward = Passing._backward

    def dropping(passing: Passing, part: Action, gradient: Tensor | None) -> Tensor | None:
        input_gradient = backward(passing, part, gradient)
        return torch.zeros_like(input_gradient) if input_gradient is not None and part.micro_batch == 0 else input_gradient

    return patch.object(Passing, "_backward", dropping)


def _pp_documents(trainer: Trainer) -> Plant:
    forward = trainer.passes.forward

    def blind(batch: Any, *, stage: int = 0, received: Tensor | None = None) -> Tensor:
        masked = batch if stage == 0 else replace(batch, document_ids=torch.zeros_like(batch.document_ids))
        return forward(masked, stage=stage, received=received)

    return patch.object(trainer.passes, "forward", blind)


def _pp_tied(trainer: Trainer) -> Plant:
    return patch.object(Share, "_sum_tied", lambda share: None)


def _twice(method: str) -> Plant:
    """Context in which a share sums twice."""
    once = getattr(Share, method)

    def twice(share: Share) -> None:
        once(share)
        once(share)

    return patch.object(Share, method, twice)


def _pp_tied_twice(trainer: Trainer) -> Plant:
    return _twice("_sum_tied")


def _pp_tied_updated_twice(trainer: Trainer) -> Plant:
    update = trainer.update

    def twice(norm: float) -> float:
        ends = [shard.parameter for shard in trainer.share.local_parameters if shard.name == TIED and shard.is_second]
        before = [local(parameter).detach().clone() for parameter in ends]
        rate = update(norm)
        with torch.no_grad():
            for parameter, old in zip(ends, before, strict=True):
                local(parameter).add_(local(parameter) - old)
        return rate

    return patch.object(trainer, "update", twice)


def _pp_weights_dropped(trainer: Trainer) -> Plant:
    make = pipeline_passes.make_gradients

    def forgetful(waiting: Waiting) -> None:
        make(waiting[:-1])

    return patch.object(pipeline_passes, "make_gradients", forgetful)


def _pp_mirror(trainer: Trainer) -> Plant:
    return patch.object(Share, "_sum_mirrors", lambda share: None)


def _pp_mirror_twice(trainer: Trainer) -> Plant:
    return _twice("_sum_mirrors")


def _pp_mirror_drifts(trainer: Trainer) -> Plant:
    sum_mirrors = Share._sum_mirrors

    def leave_mirrors_apart(share: Share) -> None:
        gradients = [
            None if shard.parameter.grad is None else local(shard.parameter.grad).clone() for shard in share.local_parameters
        ]
        sum_mirrors(share)
        for shard, gradient in zip(share.local_parameters, gradients, strict=True):
            if share.mirror < share.mesh.coordinates.pp and shard.parameter.grad is not None:
                local(shard.parameter.grad).copy_(torch.zeros(()) if gradient is None else gradient)

    return patch.object(Share, "_sum_mirrors", leave_mirrors_apart)


def _norm_of_mirrors(trainer: Trainer) -> Plant:
    return patch.object(Share, "_counts", lambda share, shard: not shard.is_second and not shard.weight_shard.tp_copy)
