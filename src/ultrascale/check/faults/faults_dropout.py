"""Faults of dropout: bits that follow a rank's own count of things, or that are others in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ultrascale.check.faults.fault import Home, fault
from ultrascale.description.run import Run
from ultrascale.kernels import dropout
from ultrascale.train.micro_batches import MicroBatch
from ultrascale.train.trainer import Trainer

DROPS = {"dropout": 0.2}


def _drops(run: Run) -> bool:
    return run.model.dropout > 0


def _splits_sequences(run: Run) -> bool:
    return _drops(run) and run.layout.cp > 1


@fault("dropout-own-places", "a rank drops by its own count of tokens, not by their place in the sequence (Megatron#1256)",
       needs="cp > 1 and dropout", fits=_splits_sequences, home=Home(layout={"cp": 2}, model=DROPS))  # fmt: skip
def _own_places(trainer: Trainer) -> Iterator[None]:
    to_device = trainer.to_device

    def own(sequences: Any) -> MicroBatch:
        batch = to_device(sequences)
        keys = dropout.token_keys(sequences.numbers, batch.tokens.shape[1], trainer.run.seed)
        return replace(batch, dropout_keys=torch.from_numpy(keys))

    with patch.object(trainer, "to_device", own):
        yield


@fault("dropout-same-on-ranks", "every rank draws the bits of the first",
       needs="dp > 1 and dropout", fits=lambda run: _drops(run) and run.layout.dp > 1,
       home=Home(layout={"dp": 2}, model=DROPS))  # fmt: skip
def _same_on_ranks(trainer: Trainer) -> Iterator[None]:
    to_device, layout, dp = trainer.to_device, trainer.run.layout, trainer.share.mesh.at.dp

    def first(sequences: Any) -> MicroBatch:
        return to_device(replace(sequences, numbers=sequences.numbers - dp * layout.micro_batch_size))

    with patch.object(trainer, "to_device", first):
        yield


@fault("dropout-drawn-again", "recomputation drops other elements than the forward pass did",
       needs="recomputation and dropout", fits=lambda run: _drops(run) and run.layout.recompute == "full",
       home=Home(layout={"recompute": "full"}, model=DROPS))  # fmt: skip
def _drawn_again(trainer: Trainer) -> Iterator[None]:
    calls, dropped = iter(range(1 << 30)), dropout.dropped

    def others(keys: torch.Tensor, site: int, width: int, rate: float) -> torch.Tensor:
        return dropped(keys, site + 1000 * next(calls), width, rate)

    with patch.object(dropout, "dropped", others):
        yield
