"""Loss on held-out text, always the same sequences."""

from __future__ import annotations

import torch

from ultrascale.data.loader import Loader
from ultrascale.parallel.data import release_parameters
from ultrascale.train.trainer import Trainer


def evaluate(trainer: Trainer, loader: Loader, num_sequences: int) -> float:
    """Mean loss in nats over the first `num_sequences` sequences of `loader`, on every rank.

    Ranks take turns micro-batch by micro-batch; all do the same number of forward passes, because each one gathers
    parameters from all of them. What a rank has too many of it computes and does not count.
    """
    size, dp, at, ranks = trainer.run.layout.micro_batch_size, trainer.run.layout.dp, trainer.share.mesh.at, trainer.ranks
    loss_sum, targets = 0.0, 0
    with torch.no_grad():
        for start in range(0, num_sequences, size * dp):
            first = start + at.dp * size
            numbers = [n for n in range(first, first + size) if n < num_sequences]
            batch = trainer.to_device(loader.read(numbers or [0]))
            loss = trainer.forward(batch)
            if numbers and at.leads_replica:
                loss_sum += float(loss)
                targets += batch.num_targets
    for stage in trainer.share.stages.values():
        release_parameters(stage)
    loss_total, target_total = ranks.sum(torch.tensor([loss_sum, float(targets)], dtype=torch.float64)).tolist()
    return loss_total / max(1.0, target_total)
