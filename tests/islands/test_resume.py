"""A run of islands that is stopped and goes on is the run that was not; islands that come anew take the state of another."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from islands.runs import ONE, island, run_of, trained, weights
from train.small_runs import at_step, curve, make_corpus, rows, same, state, train_ranks

from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Checkpoint
from ultrascale.description.sections.islands import Islands
from ultrascale.train.trainer import Trainer

HARD = Islands(2, every_steps=4, fragments=2, overlap_steps=1, dtype="int4")
"""Momentum, residuals, and fragments under way at most steps."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("islands")
    make_corpus(folder / "tokens")
    return folder


def end_one(trainer: Trainer) -> None:
    if trainer.ranks.island == 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("step", "degrees"), [(6, ()), (7, ()), (7, (1, 2))])
def test_a_run_that_was_stopped_ends_with_the_same_bits(home: Path, step: int, degrees: tuple[int, ...]) -> None:
    of, settings = replace(ONE, zero_stage=3), replace(HARD, dp=degrees)
    names = (f"calm{len(degrees)}", f"stopped-{step}-{len(degrees)}")
    calm, stopped = (run_of(home, name, of, islands=settings, batch=Batch(11, 12)) for name in names)
    if not (home / calm.name).exists():
        trained(calm)
    outcomes = train_ranks(stopped, before_step=at_step(step, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)))
    assert [one["steps_done"] for one in outcomes] == [step] * stopped.num_processes
    assert same(trained(stopped), state(calm))
    assert same(state(island(stopped, 1)), state(island(calm, 1)))
    assert curve(stopped) == curve(calm)
    assert rows(stopped, "outer/steps")[-1] == rows(calm, "outer/steps")[-1]


def test_an_island_that_leaves_stops_the_others_at_their_next_outer_step(home: Path) -> None:
    settings = Islands(2, every_steps=4)
    calm, left = run_of(home, "calm-of-4", islands=settings), run_of(home, "left", islands=settings)
    outcomes = train_ranks(left, before_step=at_step(6, end_one))
    assert [(one["steps_done"], one["stopped"]) for one in outcomes] == [(8, True), (6, True)]
    assert same(trained(left), trained(calm))


def test_any_number_of_islands_goes_on_as_any_other(home: Path) -> None:
    two = run_of(home, "grows", islands=Islands(2, every_steps=4), steps=8, checkpoint=Checkpoint(every_steps=4, export=False))
    trained(two)
    four = replace(two, islands=replace(two.islands, count=4), steps=12)
    trained(four)
    assert all(same(weights(four), weights(island(four, number))) for number in (1, 2, 3))
    one = replace(two, islands=Islands(), steps=14)
    trained(one)
    again = replace(two, islands=replace(two.islands, count=2), steps=16)
    trained(again)
    assert "islands 1 took the state of island 0, at step 14" in (home / "grows" / "log.txt").read_text().replace(
        "island 1 took", "islands 1 took"
    )
    tokens = [json.loads(line)["progress/tokens"] for line in (home / "grows" / "metrics.jsonl").read_text().splitlines()]
    assert tokens == [min(4, n) * 44 + max(0, n - 4) * 88 for n in range(1, 17)]


@pytest.mark.parametrize(("layout", "lost"), [(replace(ONE, zero_stage=3), 0), (replace(ONE, tp=2), 1)])
def test_an_island_takes_the_state_of_one_of_another_dp_as_from_its_checkpoint(home: Path, layout: Layout, lost: int) -> None:
    settings = Islands(2, every_steps=4, dp=(1, 2))
    names = (f"copied-{lost}", f"lost-{lost}")
    runs = [run_of(home, name, layout, steps=8, islands=settings, batch=Batch(11, 12)) for name in names]
    for run in runs:
        trained(replace(run, steps=4))
        folders = [home / run.name, home / run.name / "islands" / "1"]
        shutil.rmtree(folders[lost] / "checkpoints")
        if run is runs[0]:
            shutil.copytree(folders[1 - lost] / "checkpoints", folders[lost] / "checkpoints")
        trained(run)
    copied, sent = runs
    logs = [log.read_text() for log in (home / sent.name).rglob("log.txt")]
    assert any(f"island {lost} took the state of island {1 - lost}, at step 4" in text for text in logs)
    assert same(state(sent), state(copied)) and same(state(island(sent, 1)), state(island(copied, 1)))
