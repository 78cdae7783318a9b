"""Sequences of each step. The batch-size ramp is a pure function of the step, so a checkpoint needs no position in the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale.description.run import Batch


@dataclass(frozen=True)
class StepSpan:
    """Sequences of one optimizer step, by global number."""

    first_sequence: int
    num_sequences: int

    @property
    def numbers(self) -> range:
        return range(self.first_sequence, self.first_sequence + self.num_sequences)

    def of_island(self, island: int, degrees: Sequence[int]) -> StepSpan:
        """Share of one island, proportional to its entry in `degrees`, whose sum divides the number of sequences."""
        sequences_per_degree = self.num_sequences // sum(degrees)
        return StepSpan(
            self.first_sequence + sequences_per_degree * sum(degrees[:island]), sequences_per_degree * degrees[island]
        )


def step_span(batch: Batch, step: int) -> StepSpan:
    """Sequences of `step` (counted from zero), including the batch-size ramp.

    A stage of the ramp ends with the first step that reaches its `until_tokens`.
    """
    first_step = first_sequence = 0
    for stage in batch.ramp:
        missing = stage.until_tokens - first_sequence * batch.sequence_length
        steps = max(0, -(-missing // (stage.sequences_per_batch * batch.sequence_length)))
        if step < first_step + steps:
            return StepSpan(first_sequence + (step - first_step) * stage.sequences_per_batch, stage.sequences_per_batch)
        first_step += steps
        first_sequence += steps * stage.sequences_per_batch
    return StepSpan(first_sequence + (step - first_step) * batch.sequences_per_batch, batch.sequences_per_batch)


def sequences_after(batch: Batch, steps: int) -> int:
    """Sequences trained on after `steps` steps; also the number that a run of that length reads."""
    return step_span(batch, steps).first_sequence


def tokens_after(batch: Batch, steps: int) -> int:
    """Tokens trained on after `steps` steps, counting every position of every sequence."""
    return sequences_after(batch, steps) * batch.sequence_length
