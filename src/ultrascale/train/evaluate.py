"""Loss on held-out text, always the same sequences."""

from __future__ import annotations

import torch

from ultrascale import heartbeat
from ultrascale.data.loader import Loader
from ultrascale.parallel.data import release_parameters
from ultrascale.spec.progress import StepSpan
from ultrascale.train.micro_batches import MicroBatch, sequence_numbers
from ultrascale.train.trainer import Trainer


def evaluate(trainer: Trainer, loader: Loader, num_sequences: int) -> float | None:
    """Mean loss in nats over the first `num_sequences` sequences of `loader`, on every rank; None if none has a valid target.

    All ranks do the same number of forward passes, because each one gathers parameters from all of them. Sequences too many are
    computed and have no valid targets.
    """
    layout, at = trainer.run.layout, trainer.share.mesh.at
    together = layout.dp * layout.micro_batch_size
    span = StepSpan(0, -(-num_sequences // together) * together)
    batches = [_batch(trainer, loader, numbers, num_sequences) for numbers in sequence_numbers(span, layout, at)]
    losses = trainer.passes.evaluate(batches)
    for stage in trainer.share.stages.values():
        release_parameters(stage)
    targets = sum(batch.num_targets for batch in batches) if at.pp == 0 and at.leads_replica else 0
    sums = torch.stack([trainer.counted(losses), torch.tensor(targets, dtype=torch.float64)])
    loss_total, target_total = trainer.ranks.sum(sums).tolist()
    return loss_total / target_total if target_total else None


def _batch(trainer: Trainer, loader: Loader, numbers: range, num_sequences: int) -> MicroBatch:
    heartbeat.beat("reading held-out text")
    sequences = loader.read([min(number, num_sequences - 1) for number in numbers])
    for row, number in enumerate(numbers):
        if number >= num_sequences:
            sequences.targets[row] = -100
    return trainer.to_device(sequences)
