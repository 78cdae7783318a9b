"""How long ranks wait for one another in a real run: a step's limit in steps, more at the start and in parts that are slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.small_runs import BeforeStep, at_step, make_corpus, rows, small_run, train_here, train_ranks

from ultrascale import heartbeat
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Evaluation, Faults, Run
from ultrascale.train.session import begin as rewind
from ultrascale.train.trainer import Trainer

LIMIT, LONGER = 15.0, 20.0
"""Seconds. Every wait after the first step is bounded by the one; what comes too late takes the other."""
COPIES, STAGES = Layout(dp=2, zero_stage=2, micro_batch_size=2), Layout(pp=2, micro_batch_size=2)


@pytest.fixture
def run(tmp_path) -> Run:
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, layout=COPIES, steps=6, collective_timeout_seconds=LIMIT)
    return replace(run, checkpoint=Checkpoint(every_steps=2, export=False))


@pytest.mark.parametrize("layout", [COPIES, STAGES], ids=["collectives", "messages between stages"])
def test_a_rank_is_waited_for_longer_in_the_first_step_than_in_those_after_it(run, layout):
    run = replace(run, layout=layout)
    found = train_ranks(run, before_step=both(at_step(0, slow_forward, rank=0), at_step(3, slow_forward, rank=0)))
    assert "it did not come in time (collective_timeout_seconds)" in found[1]["text"]
    assert [step for (step,) in rows(run, "step")] == [1, 2, 3]


def both(*acts: BeforeStep) -> BeforeStep:
    def act(trainer: Trainer) -> None:
        for one in acts:
            one(trainer)

    return act


def once(act: BeforeStep) -> BeforeStep:
    """Not again where a rewind leads back to the same step."""
    done: list[Trainer] = []

    def first(trainer: Trainer) -> None:
        if not done:
            done.append(trainer)
            act(trainer)

    return first


def slow_forward(trainer: Trainer) -> None:
    """Once: a compiler, say."""
    forward = trainer.passes.forward

    def slow(*arguments, **options) -> torch.Tensor:
        trainer.passes.forward = forward
        time.sleep(LONGER)
        return forward(*arguments, **options)

    trainer.passes.forward = slow


def spoil_and_slow_the_way_back(trainer: Trainer) -> None:
    """A NaN on both ranks at step 3, which are as slow to read a checkpoint as `LONGER` on the first."""
    restore = rewind.restore_newest
    forward = trainer.passes.forward

    def spoilt(*arguments, **options) -> torch.Tensor:
        trainer.passes.forward = forward
        return forward(*arguments, **options) * float("nan")

    def slowly(trainer: Trainer, *arguments, **options):
        if trainer.ranks.is_first:
            time.sleep(LONGER)
        return restore(trainer, *arguments, **options)

    trainer.passes.forward, rewind.restore_newest = spoilt, slowly


def test_ranks_wait_for_the_slowest_on_the_way_back_to_a_checkpoint_and_not_as_long_in_the_step_after(run):
    run = replace(run, faults=Faults(on_anomaly="rewind"))
    found = train_ranks(run, before_step=both(at_step(3, once(spoil_and_slow_the_way_back)), at_step(5, slow_forward, rank=0)))
    assert "collective_timeout_seconds" in found[1]["text"]
    assert [step for (step,) in rows(run, "step")] == [1, 2, 3, 4, 5]
    assert '"rewind", "step": 3, "to": 2' in (Path(run.folder) / run.name / "events.jsonl").read_text()


def test_an_evaluation_gives_signs_of_life_all_along(run, monkeypatch, tmp_path):
    said: list[str] = []
    monkeypatch.setattr(heartbeat, "beat", lambda doing, **options: said.append(doing))
    alone = replace(run, layout=Layout(), steps=2, evaluation=Evaluation(every_steps=2, sequences=4))
    train_here(replace(alone, data=replace(run.data, validation=run.data.sources)))
    assert said.count("evaluating") == 4 and said.count("reading held-out text") == 4


@pytest.fixture
def signs_of_life(tmp_path) -> Iterator[heartbeat.HeartbeatWriter]:
    """Of this process, under `tmp_path`."""
    heartbeat.start(tmp_path, 0, hang_seconds=5.0)
    assert heartbeat._heart is not None
    yield heartbeat._heart
    heartbeat.stop()


def test_what_is_patient_stays_so_over_waits_for_others(signs_of_life, tmp_path):
    signs_of_life.started_at, signs_of_life.steps_done = 0, 1

    def allowance() -> float:
        return heartbeat.read(Path(tmp_path))[0].allowance

    with heartbeat.patient("restoring", 3600.0):
        with heartbeat.waits("a barrier"):
            assert allowance() == 3605.0
        assert allowance() == 3605.0
    assert allowance() == 5.0
