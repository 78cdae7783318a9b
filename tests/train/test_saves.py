"""A disk that fails for a while, or for good, in the middle of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from train.small_runs import BeforeStep, curve, same, small_run, state, train_here, train_ranks

from ultrascale.checkpoint import CheckpointError, SaveFailedError, newest_valid
from ultrascale.checkpoint.disk import files
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Run
from ultrascale.train.trainer import Trainer

COPIES = Layout(dp=2, zero_stage=3, micro_batch_size=2)


def run_of(home: Path, name: str, **settings) -> Run:
    return small_run(home, name=name, steps=60, layout=COPIES, checkpoint=Checkpoint(20, export=False, **settings))


def events(run: Run) -> list[tuple[str, int]]:
    text = (Path(run.folder) / run.name / "events.jsonl").read_text()
    return [(row["event"], row["step"]) for row in map(json.loads, text.splitlines())]


@pytest.fixture(autouse=True)
def disk_afterwards(monkeypatch):
    """Whatever a test does to writing in this process is undone."""
    monkeypatch.setattr(files, "_write_blocks", files._write_blocks)


def full_while(holds: Callable[[int], bool], rank: int = 1) -> BeforeStep:
    """The disk is full for that rank's shards at those steps."""
    write_blocks = files._write_blocks

    def act(trainer: Trainer) -> None:
        def refuse(*arguments):
            raise OSError(28, "No space left on device")

        bad = trainer.ranks.rank == rank and holds(trainer.steps_done + 1)
        files._write_blocks = refuse if bad else write_blocks

    return act


@pytest.mark.catalogue(25)
def test_a_disk_that_is_full_for_a_while_ends_no_run_and_is_used_again_soon(home, capfd):
    calm = run_of(home, "calm")
    train_ranks(calm)
    for asynchronous in (False, True):
        expect_recovery(run_of(home, f"recovers-{asynchronous}", asynchronous=asynchronous), calm, capfd)


def expect_recovery(run: Run, calm: Run, capfd: pytest.CaptureFixture[str]) -> None:
    """It ends as `calm` does, whose disk never fails."""
    asynchronous = run.checkpoint.asynchronous
    outcomes = train_ranks(run, before_step=full_while(lambda step: 15 <= step < 24))
    told = capfd.readouterr().out
    assert [one.get("steps_done") for one in outcomes] == [60, 60]
    failed = [step for event, step in events(run) if event == "save failed"]
    assert failed == ([40] if asynchronous else [20, 22])  # in the background it is seen at the next save
    assert f"WARNING: saving failed at step {failed[0]}, nothing is saved yet; once more at step {failed[0] + 2};" in told
    assert "rank 1 of 2: OSError: [Errno 28] No space left on device" in told
    saved = sorted(path.name for path in (Path(run.folder) / run.name / "checkpoints").iterdir())
    assert saved == (["step-00000042", "step-00000060"] if asynchronous else ["step-00000040", "step-00000060"])
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.catalogue(25)
def test_a_disk_that_stays_full_ends_the_run_after_as_many_saves_as_are_allowed(home):
    run = run_of(home, "full", failures_allowed=3)
    outcomes = train_ranks(run, before_step=full_while(lambda step: step > 20))
    assert [one["error"] for one in outcomes] == ["SaveFailedError"] * 2
    assert [step for event, step in events(run) if event == "save failed"] == [40, 42, 44]
    assert len(curve(run)) == 46
    found = newest_valid(Path(run.folder) / run.name / "checkpoints")
    assert found is not None and found.name == "step-00000020"


@pytest.mark.catalogue(25)
def test_control_without_patience_the_first_failure_ends_the_run(home):
    run = run_of(home, "strict", failures_allowed=0)
    outcomes = train_ranks(run, before_step=full_while(lambda step: 15 <= step < 24))
    assert [one["error"] for one in outcomes] == ["SaveFailedError"] * 2
    assert len(curve(run)) == 20


def test_the_last_save_of_a_run_may_not_fail(home):
    run = replace(run_of(home, "last"), layout=Layout(micro_batch_size=2), steps=30)
    with pytest.raises(SaveFailedError):
        train_here(run, before_step=full_while(lambda step: step > 25, rank=0))


def test_a_save_that_fails_at_the_last_step_announces_no_step_that_cannot_come(home, capfd):
    run = replace(run_of(home, "no-steps-left"), layout=Layout(micro_batch_size=2), steps=20)
    with pytest.raises(SaveFailedError):
        train_here(run, before_step=full_while(lambda step: step > 15, rank=0))
    told = capfd.readouterr().out
    assert "saving failed at step 20, nothing is saved yet; once more at once, since no step is left;" in told
    assert "step 22" not in told


def test_the_retry_of_a_save_is_at_the_last_step_at_the_latest(home, capfd):
    run = replace(run_of(home, "one-step-left"), layout=Layout(micro_batch_size=2), steps=21)
    train_here(run, before_step=full_while(lambda step: step == 20, rank=0))
    assert "saving failed at step 20, nothing is saved yet; once more at step 21;" in capfd.readouterr().out


def test_a_save_in_the_background_that_fails_at_the_end_is_done_once_more(home):
    run = replace(run_of(home, "pending", asynchronous=True), layout=Layout(micro_batch_size=2), steps=40)
    write_blocks, calls = files._write_blocks, []

    def refuse_once(*arguments):
        if arguments[1:2] and len(arguments[1]) > 1000 and len(calls) < 1 and full:
            calls.append(1)
            raise OSError(28, "No space left on device")
        return write_blocks(*arguments)

    full: list[int] = []
    files._write_blocks = refuse_once
    train_here(run, before_step=lambda trainer: full.append(1) if trainer.steps_done == 39 else None)
    assert calls == [1] and [event for event, _ in events(run)][-2:] == ["save failed", "end"]
    found = newest_valid(Path(run.folder) / run.name / "checkpoints")
    assert found is not None and found.name == "step-00000040"


def test_a_state_that_is_not_finite_is_not_taken_for_a_failing_disk(home):
    run = replace(run_of(home, "nan"), layout=Layout(micro_batch_size=2))

    def spoil(trainer: Trainer) -> None:
        if trainer.steps_done == 19:
            for parameter in trainer.share.parameters():
                trainer.optimizer.state[parameter]["exp_avg_sq"].fill_(float("nan"))

    with pytest.raises(CheckpointError, match="NaN or infinite") as caught:
        train_here(run, before_step=spoil)
    assert not isinstance(caught.value, SaveFailedError)
