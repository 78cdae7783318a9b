"""Faults of context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ultrascale.check.faults.table import Plant
from ultrascale.kernels.loss.cross_entropy import IGNORED
from ultrascale.parallel.context import context_attention, context_gather, context_masks, context_ring
from ultrascale.parallel.context.context_parallel import LocalBatch
from ultrascale.train import micro_batches
from ultrascale.train.micro_batches import MicroBatch
from ultrascale.train.trainer import Trainer


def _changed(trainer: Trainer, change: Callable[[MicroBatch], MicroBatch]) -> Plant:
    to_device = trainer.to_device
    return patch.object(trainer, "to_device", lambda sequences: change(to_device(sequences)))


def _cp_rope_restarted(trainer: Trainer) -> Plant:
    def restarted(batch: MicroBatch) -> MicroBatch:
        assert batch.positions is not None
        return replace(batch, positions=torch.arange(batch.positions.shape[-1]).expand_as(batch.positions))

    return _changed(trainer, restarted)


def _cp_order(trainer: Trainer) -> Plant:
    shard_batch = micro_batches.shard_batch

    def shifted(*arrays: Any, **options: Any) -> LocalBatch:
        batch = shard_batch(*arrays, **options)
        tokens, targets, positions = (np.roll(array, 1, axis=1) for array in batch[:3])
        return batch._replace(tokens=tokens, targets=targets, positions=positions)

    return patch.object(micro_batches, "shard_batch", shifted)


def _cp_targets(trainer: Trainer) -> Plant:
    def rolled(batch: MicroBatch) -> MicroBatch:
        targets = torch.where(batch.targets == IGNORED, IGNORED, batch.tokens.roll(-1, dims=1))
        return replace(batch, targets=targets)

    return _changed(trainer, rolled)


def _cp_weights_of_parts(trainer: Trainer) -> Plant:
    def averaged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        out.lerp_(part.to(out.dtype), 0.5)
        torch.logaddexp(lse, part_lse, out=lse)

    return patch.object(context_attention, "join", averaged)


def _cp_own_lse(trainer: Trainer) -> Plant:
    backward = context_attention.attend_backward

    def alone(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Any:
        local_out, local_lse = context_attention.attend(query, key, value, **options)
        return backward(grad, query, key, value, local_out, local_lse, **options)

    return patch.object(context_attention, "attend_backward", alone)


@contextmanager
def _cp_gradients_lost(trainer: Trainer) -> Iterator[None]:
    ring, scattered = context_ring.RingGradients.received, context_gather.ScatteredGradients.received

    def lost(received: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda gradients: [list(received(gradients)), iter(())][1]

    with (
        patch.object(context_ring.RingGradients, "received", lost(ring)),
        patch.object(context_gather.ScatteredGradients, "received", lost(scattered)),
    ):
        yield


def _cp_documents_seen(trainer: Trainer) -> Plant:
    visible = context_masks._visible

    def blind(rows: Any, place: int, source: int, view: Any, document_ids: Any, *rest: Any) -> Tensor:
        return visible(rows, place, source, view, None, *rest)

    return patch.object(context_masks, "_visible", blind)
