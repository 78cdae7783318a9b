"""Faults of context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from ultrascale.check.faults.fault import Home, axis, fault
from ultrascale.description.run import Run
from ultrascale.kernels.loss.cross_entropy import IGNORED
from ultrascale.parallel.context import context_attention, context_gather, context_masks, context_ring
from ultrascale.parallel.context.context_parallel import LocalBatch
from ultrascale.train import micro_batches
from ultrascale.train.micro_batches import MicroBatch
from ultrascale.train.trainer import Trainer

HOME = Home(layout={"cp": 2})


def _rings(run: Run) -> bool:
    """True if partial results of attention are merged: the ring of context parallelism has more than one rank."""
    return run.layout.cp > 1 and run.layout.cp_grid[0] > 1


def _changed(trainer: Trainer, change: Callable[[MicroBatch], MicroBatch]) -> Any:
    to_device = trainer.to_device
    return patch.object(trainer, "to_device", lambda sequences: change(to_device(sequences)))


@fault("cp-rope-restarted", "rotary positions are counted from the start of each rank's part", needs="cp > 1, rotary positions",
       fits=lambda run: run.layout.cp > 1 and run.model.position_embedding == "rotary", home=HOME)  # fmt: skip
def _rope_restarted(trainer: Trainer) -> Iterator[None]:
    def restarted(batch: MicroBatch) -> MicroBatch:
        assert batch.positions is not None
        return replace(batch, positions=torch.arange(batch.positions.shape[-1]).expand_as(batch.positions))

    with _changed(trainer, restarted):
        yield


@fault("cp-order", "tokens are dealt out one place further on than masks take them to be (zigzag off by one)", needs="cp > 1",
       fits=axis("cp"), home=HOME)  # fmt: skip
def _order(trainer: Trainer) -> Iterator[None]:
    cut_batch = micro_batches.cut_batch

    def shifted(*arrays: Any, **options: Any) -> LocalBatch:
        batch = cut_batch(*arrays, **options)
        tokens, targets, positions = (np.roll(array, 1, axis=1) for array in batch[:3])
        return batch._replace(tokens=tokens, targets=targets, positions=positions)

    with patch.object(micro_batches, "cut_batch", shifted):
        yield


@fault("cp-targets", "each rank makes its targets from its own tokens (Megatron#673: labels rolled over the border)",
       needs="cp > 1", fits=axis("cp"), home=HOME)  # fmt: skip
def _targets(trainer: Trainer) -> Iterator[None]:
    def rolled(batch: MicroBatch) -> MicroBatch:
        own = torch.where(batch.targets == IGNORED, IGNORED, batch.tokens.roll(-1, dims=1))
        return replace(batch, targets=own)

    with _changed(trainer, rolled):
        yield


@fault("cp-weights-of-parts", "parts of attention are joined without their log-sum-exp", needs="cp > 1 over a ring",
       fits=_rings, home=HOME)  # fmt: skip
def _weights_of_parts(trainer: Trainer) -> Iterator[None]:
    def averaged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        out.lerp_(part.to(out.dtype), 0.5)
        torch.logaddexp(lse, part_lse, out=lse)

    with patch.object(context_attention, "join", averaged):
        yield


@fault("cp-own-lse", "the backward pass of a part takes its own log-sum-exp for all parts' (TransformerEngine#1557)",
       needs="cp > 1 over a ring", fits=_rings, home=HOME)  # fmt: skip
def _own_lse(trainer: Trainer) -> Iterator[None]:
    backward = context_attention.attend_backward

    def alone(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Any:
        own, own_lse = context_attention.attend(query, key, value, **options)
        return backward(grad, query, key, value, own, own_lse, **options)

    with patch.object(context_attention, "attend_backward", alone):
        yield


@fault("cp-gradients-lost", "gradients of keys and values never come home from other ranks", needs="cp > 1 over a ring",
       fits=_rings, home=HOME)  # fmt: skip
def _gradients_lost(trainer: Trainer) -> Iterator[None]:
    ring, scattered = context_ring.RingGradients.arrived, context_gather.ScatteredGradients.arrived

    def lost(arrived: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda gradients: [list(arrived(gradients)), iter(())][1]

    with (
        patch.object(context_ring.RingGradients, "arrived", lost(ring)),
        patch.object(context_gather.ScatteredGradients, "arrived", lost(scattered)),
    ):
        yield


@fault("cp-documents-seen", "masks leave out documents where queries and keys are on several ranks", needs="cp > 1, documents",
       fits=lambda run: run.layout.cp > 1 and run.data.document_mask, home=HOME)  # fmt: skip
def _documents_seen(trainer: Trainer) -> Iterator[None]:
    visible = context_masks._visible

    def blind(rows: Any, place: int, source: int, view: Any, document_ids: Any, *rest: Any) -> Tensor:
        return visible(rows, place, source, view, None, *rest)

    with patch.object(context_masks, "_visible", blind):
        yield
