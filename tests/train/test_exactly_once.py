"""Over stops, kills and changes of dp, every step is trained on its sequences: none lost, none twice, in the same order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planted import fails
from train.small_runs import BeforeStep, make_corpus, small_run, train_ranks

from ultrascale.data.loader import Loader
from ultrascale.description.layout import Layout
from ultrascale.description.progress import StepSpan, step_span
from ultrascale.description.run import Batch, RampStage, Source
from ultrascale.launch.forked import RankFailed
from ultrascale.train import step as step_module
from ultrascale.train import trainer as trainer_module
from ultrascale.train.micro_batches import sequence_numbers
from ultrascale.train.trainer import Trainer
from ultrascale.work.sharding.places import Coordinates

BATCH = Batch(sequence_length=11, sequences_per_batch=24, ramp=(RampStage(24 * 11, 12),))
STRETCHES = [(4, 3, 3), (2, 3, 5), (3, 2, 7), (1, 4, 8), (6, 2, None)]
"""dp, micro-batch size, and the step before which each stretch of the run ends."""
KILLED = 5
"""This end is a SIGKILL of one rank, between two saves."""
Noted = list[dict[int, list[int]]]
"""For each stretch, the sequences of every step, over all ranks, in the order of micro-batches and ranks."""


def noting(folder: Path, stop: int | None, bug: Callable[[], None]) -> BeforeStep:
    """Write down which sequences this rank reads for which step, and stop where told."""

    def act(trainer: Trainer) -> None:
        loader, at = trainer.loader, trainer.steps_done
        if not hasattr(loader, "noted"):
            bug()
            read = loader.read
            path = folder / f"rank-{trainer.ranks.rank}"

            def noted(numbers):
                with open(path, "a") as file:
                    file.write(json.dumps([trainer.steps_done, list(numbers)]) + "\n")
                return read(numbers)

            loader.read, loader.noted = noted, True  # type: ignore[method-assign, attr-defined]
        if at == stop and stop == KILLED and trainer.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if at == stop and stop != KILLED:
            trainer.request_stop()

    return act


def train_in_stretches(home: Path, stretches: Sequence[Any], bug: Callable[[], None] = lambda: None) -> Noted:
    found = []
    for number, (dp, micro, stop) in enumerate(stretches):
        folder = home / f"stretch-{number}"
        folder.mkdir()
        layout = Layout(dp=dp, zero_stage=1 if dp > 1 else 0, micro_batch_size=micro)
        run = small_run(home, batch=BATCH, layout=layout, steps=10)
        run = replace(run, checkpoint=replace(run.checkpoint, every_steps=2))
        try:
            train_ranks(run, before_step=noting(folder, stop, bug))
        except RankFailed:
            assert stop == KILLED
        found.append(_gathered(folder, dp))
    return found


def _gathered(folder: Path, dp: int) -> dict[int, list[int]]:
    """The micro-batches of a step in the order of their numbers: the j-th of rank r is the (j dp + r)-th."""
    ranks = [[json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()] for rank in range(dp)]
    of_step: dict[int, list[tuple[int, list[int]]]] = {}
    for rank, lines in enumerate(ranks):
        seen: dict[int, int] = {}
        for step, numbers in lines:
            of_step.setdefault(step, []).append((seen.get(step, 0) * dp + rank, numbers))
            seen[step] = seen.get(step, 0) + 1
    return {step: [n for _, numbers in sorted(parts) for n in numbers] for step, parts in of_step.items()}


def exactly_once(found: Noted, batch: Batch, steps: int) -> bool:
    """Whether the last stretch to train a step saw its sequences, and all steps together each number once."""
    last = {step: numbers for stretch in found for step, numbers in stretch.items()}
    expected = {step: list(step_span(batch, step).numbers) for step in range(steps)}
    everything = [number for step in range(steps) for number in last.get(step, [])]
    return last == expected and everything == list(range(len(everything)))


@pytest.mark.catalogue(13, 42)
def test_each_step_has_its_sequences_over_stops_a_kill_and_five_numbers_of_ranks(home):
    found = train_in_stretches(home, STRETCHES)
    assert exactly_once(found, BATCH, 10)
    assert sorted(found[2]) == [4, 5, 6, 7], "after the kill the steps since the last save are done again"


def restart_at_nothing() -> None:
    """The bug: data begins anew with every start."""
    first: list[int] = []

    def span(batch: Batch, step: int) -> StepSpan:
        first.append(step)
        return step_span(batch, step - first[0])

    step_module.step_span = span  # pyright: ignore[reportPrivateImportUsage]


def forget_a_rank() -> None:
    """The bug: ranks count as if there were one more of them."""

    def numbers(span: StepSpan, layout: Layout, at: Coordinates) -> list[range]:
        return sequence_numbers(span, replace(layout, dp=layout.dp + 1), at)

    trainer_module.sequence_numbers = numbers  # pyright: ignore[reportPrivateImportUsage]


def read_one_step_ahead() -> None:
    """The bug: what was read ahead of a stop is taken for trained."""
    step_module.step_span = lambda batch, step: step_span(batch, step + (step > 3))  # pyright: ignore[reportPrivateImportUsage]


@pytest.mark.catalogue(13, 42)
@pytest.mark.parametrize("bug", [restart_at_nothing, forget_a_rank, read_one_step_ahead])
def test_control_sequences_lost_or_read_twice_are_seen(home, bug):
    assert not exactly_once(train_in_stretches(home, [(2, 3, 6), (3, 2, None)], bug), BATCH, 10)


@pytest.mark.catalogue(45)
def test_control_a_corpus_is_not_shared_out_once_where_ranks_miscount_themselves(tmp_path, monkeypatch):
    numbers = sequence_numbers
    bug = lambda span, layout, at: numbers(span, replace(layout, dp=layout.dp + 1), at)  # noqa: E731
    monkeypatch.setitem(globals(), "sequence_numbers", bug)
    fails(test_a_corpus_of_any_size_gives_every_rank_as_many_micro_batches_and_one_order, tmp_path)


@pytest.mark.catalogue(45)
def test_a_corpus_of_any_size_gives_every_rank_as_many_micro_batches_and_one_order(tmp_path):
    """From a single sequence to fifty, fewer than a batch and more, over one to eight ranks."""
    batch = replace(BATCH, ramp=())
    for size in (1, 2, 3, 7, 11, 23, 24, 25, 50):
        prefix = make_corpus(tmp_path / f"c{size}", num_tokens=size * 11 + 1)
        loader = Loader((Source(str(prefix)),), sequence_length=11, vocab_size=61, seed=3)
        sequences = loader.sequences_per_epoch[0]
        for dp, micro in ((1, 1), (2, 3), (3, 2), (4, 3), (8, 1)):
            layout = Layout(dp=dp, micro_batch_size=micro)
            places = [Coordinates.of(layout, rank) for rank in range(dp)]
            ranks = [[sequence_numbers(step_span(batch, step), layout, at) for step in range(6)] for at in places]
            assert len({tuple(map(len, rank)) for rank in ranks}) == 1
            order = [n for step in range(6) for j in range(len(ranks[0][step])) for rank in ranks for n in rank[step][j]]
            assert order == list(range(len(order)))
            _, inside = loader.locate(order)
            epochs = [inside[at : at + sequences].tolist() for at in range(0, len(order) - sequences + 1, sequences)]
            assert all(sorted(epoch) == list(range(sequences)) for epoch in epochs)
