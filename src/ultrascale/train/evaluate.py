"""Validation loss, always over the same sequences."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from ultrascale import heartbeat
from ultrascale.data.loader import Loader
from ultrascale.description.progress import StepSpan
from ultrascale.description.run import Run
from ultrascale.description.units import count_of
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.data.data_parallel import release_parameters
from ultrascale.train.micro_batches import MicroBatch, sequence_numbers
from ultrascale.train.session.moments import LoopObserver, Session, StepDone
from ultrascale.train.trainer import Trainer
from ultrascale.train.watch.signs_of_life import slow_part

TOKENS_TOGETHER, LOGITS_TOGETHER = 1 << 12, 1 << 26
"""Largest numbers in one forward pass of `evaluate_alone`, unless one sequence has more."""


class HeldOut(LoopObserver):
    """Evaluates every `evaluation.every_steps` steps, and at the end."""

    def __init__(self, validation: dict[str, Loader]):
        self.validation = validation
        """Loaders of validation data, by the name of the metric."""
        self.has_evaluated = False

    def after_step(self, session: Session, done: StepDone) -> None:
        """Evaluate, if it is due. Collective."""
        every, started = session.run.evaluation.every_steps, time.perf_counter()
        if not (session.is_due(every) or (every and session.is_complete)):
            return
        trainer = session.trainer
        compiles, self.has_evaluated = session.run.compile and not self.has_evaluated, True
        with slow_part(trainer, "evaluating", session.run.collective_timeout_seconds) if compiles else nullcontext():
            done.values |= {
                name: evaluate(trainer, loader, evaluated_sequences(session.run, loader))
                for name, loader in self.validation.items()
            }
        done.values["perf/eval_s"] = time.perf_counter() - started
        done.is_recorded = True


def evaluated_sequences(run: Run, loader: Loader) -> int:
    """Number of sequences of one validation corpus that an evaluation is over: each of them once."""
    return min(run.evaluation.sequences, sum(loader.sequences_per_epoch))


def evaluation_lines(run: Run, training: Loader, validation: dict[str, Loader]) -> list[str]:
    """A line for each metric: over how much of its validation corpus it is a mean, and if the run trains on that corpus."""
    trained = {corpus.fingerprint() for corpus in training.corpora}
    return [
        f"{name}: the mean over {evaluated_sequences(run, loader):,} of "
        f"{count_of(sum(loader.sequences_per_epoch), 'sequence')} of {loader.sources[0].path} (evaluation.sequences)"
        + ", on which the run trains too"
        * (loader.corpora[0].fingerprint() in trained)
        for name, loader in validation.items()
        if run.evaluation.every_steps
    ]


def evaluate(trainer: Trainer, loader: Loader, num_sequences: int) -> float | None:
    """Mean loss in nats over the first `num_sequences` sequences of `loader`, on every rank; None if none has a valid target.

    All ranks run the same number of forward passes, because each pass all-gathers parameters from all ranks. Surplus sequences
    are computed, but have no valid targets.
    """
    layout, coordinates = trainer.run.layout, trainer.share.mesh.coordinates
    together = layout.dp * layout.micro_batch_size
    span = StepSpan(0, -(-num_sequences // together) * together)
    batches = [_batch(trainer, loader, numbers, num_sequences) for numbers in sequence_numbers(span, layout, coordinates)]
    losses = trainer.passes.evaluate(batches)
    for stage in trainer.share.stages.values():
        release_parameters(stage)
    targets = sum(batch.num_targets for batch in batches) if coordinates.pp == 0 and coordinates.leads_replica else 0
    sums = torch.stack([trainer.counted(losses), torch.tensor(targets, dtype=torch.float64)])
    loss_total, target_total = trainer.ranks.sum(sums).tolist()
    return loss_total / target_total if target_total else None


@torch.no_grad()
def evaluate_alone(decoder: Decoder, loader: Loader, num_sequences: int) -> tuple[float, torch.Tensor]:
    """Loss of a whole model in this process: nats summed over the first `num_sequences` sequences of `loader`, and how often
    each token id is a target [V] int64."""
    device, vocabulary = decoder.head_weight.device, decoder.spec.vocab_size
    together = max(1, min(TOKENS_TOGETHER, LOGITS_TOGETHER // vocabulary) // loader.sequence_length)
    total, counts = 0.0, torch.zeros(vocabulary, dtype=torch.int64)
    for first in range(0, num_sequences, together):
        read = loader.read(range(first, min(first + together, num_sequences)))
        tokens, targets, positions, documents = (
            torch.from_numpy(array).to(device) for array in (read.tokens, read.targets, read.positions, read.document_ids)
        )
        total += float(
            decoder(tokens, targets=targets, positions=positions, document_ids=documents if loader.document_mask else None)
        )
        counts += torch.from_numpy(read.targets[read.targets >= 0]).bincount(minlength=vocabulary)
    return total, counts


def _batch(trainer: Trainer, loader: Loader, numbers: range, num_sequences: int) -> MicroBatch:
    heartbeat.beat("reading held-out text")
    sequences = loader.read([min(number, num_sequences - 1) for number in numbers])
    for row, number in enumerate(numbers):
        if number >= num_sequences:
            sequences.targets[row] = -100
    return trainer.to_device(sequences)
