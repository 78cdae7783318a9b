"""Faults of dropout: random bits that depend on a rank's own counters, or differ in the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ultrascale.check.faults.table import Plant
from ultrascale.kernels import dropout
from ultrascale.train.micro_batches import MicroBatch
from ultrascale.train.trainer import Trainer


def _dropout_own_places(trainer: Trainer) -> Plant:
    to_device = trainer.to_device

    def with_local_places(sequences: Any) -> MicroBatch:
        batch = to_device(sequences)
        keys = dropout.token_keys(sequences.numbers, batch.tokens.shape[1], trainer.run.seed)
        return replace(batch, dropout_keys=torch.from_numpy(keys))

    return patch.object(trainer, "to_device", with_local_places)


def _dropout_same_on_ranks(trainer: Trainer) -> Plant:
    to_device, layout, dp = trainer.to_device, trainer.run.layout, trainer.share.mesh.coordinates.dp

    def first(sequences: Any) -> MicroBatch:
        return to_device(replace(sequences, numbers=sequences.numbers - dp * layout.micro_batch_size))

    return patch.object(trainer, "to_device", first)


def _dropout_drawn_again(trainer: Trainer) -> Plant:
    calls, dropped = iter(range(1 << 30)), dropout.dropped

    def others(keys: torch.Tensor, site: int, width: int, rate: float) -> torch.Tensor:
        return dropped(keys, site + 1000 * next(calls), width, rate)

    return patch.object(dropout, "dropped", others)
