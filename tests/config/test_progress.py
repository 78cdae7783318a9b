"""The batch ramp."""

import pytest

from ultrascale.description.progress import sequences_after, step_span, tokens_after
from ultrascale.description.run import Batch, RampStage

RAMPED = Batch(
    sequence_length=10, sequences_per_batch=8, ramp=(RampStage(until_tokens=50, sequences_per_batch=2), RampStage(140, 4))
)


def test_without_a_ramp_every_step_takes_the_next_full_batch():
    batch = Batch(sequence_length=16, sequences_per_batch=3)
    assert [step_span(batch, step).numbers for step in range(3)] == [range(0, 3), range(3, 6), range(6, 9)]


def test_a_ramp_stage_ends_with_the_step_that_reaches_its_tokens():
    sizes = [step_span(RAMPED, step).num_sequences for step in range(7)]
    assert sizes == [2, 2, 2, 4, 4, 8, 8]


@pytest.mark.catalogue(42)
def test_steps_of_a_ramp_cover_every_sequence_once_and_in_order():
    numbers = [n for step in range(20) for n in step_span(RAMPED, step).numbers]
    assert numbers == list(range(sequences_after(RAMPED, 20)))


def test_tokens_after_counts_whole_sequences():
    assert [tokens_after(RAMPED, steps) for steps in (0, 1, 3, 4)] == [0, 20, 60, 100]
