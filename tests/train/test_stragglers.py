"""Slow ranks: named soon, and nobody else ever."""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

import pytest
from train.small_runs import small_run, train_ranks

from ultrascale.spec.layout import Layout
from ultrascale.spec.run import Faults
from ultrascale.train.stragglers import IN_A_ROW, Judge, Straggler, excess
from ultrascale.train.trainer import Trainer

WINDOW = 4


def windows(world: int, steps: int, *, seed: int, slow: dict[int, float] | None = None) -> list[list[float]]:
    """Medians of windows of noisy steps: 20 percent of log-normal noise, and one step in 20 that a pause makes ten times as
    long, on each rank for itself."""
    chance = random.Random(seed)

    def step(rank: int) -> float:
        pause = 10.0 if chance.random() < 0.05 else 1.0
        return 0.05 * chance.lognormvariate(0.0, 0.2) * pause * (slow or {}).get(rank, 1.0)

    return [[statistics.median_low(step(rank) for _ in range(WINDOW)) for rank in range(world)] for _ in range(steps // WINDOW)]


@pytest.mark.catalogue(21)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_nobody_is_named_in_a_thousand_noisy_steps(world):
    for seed in range(20):
        judge = Judge(Layout(dp=world))
        assert [found for window in windows(world, 1000, seed=seed) for found in judge.window(window)] == [], seed


@pytest.mark.catalogue(20)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("times", [2.5, 5.0])
def test_a_slow_rank_is_named_within_20_steps_and_no_other(world, times):
    late = 0
    for seed in range(50):
        judge = Judge(Layout(dp=world))
        found = [one for window in windows(world, 20, seed=seed, slow={1: times}) for one in judge.window(window)]
        assert {one.rank for one in found} <= {1}
        late += not found
    assert late <= 1


def test_a_rank_that_has_recovered_is_said_to_have():
    judge = Judge(Layout(dp=2))
    slow = [judge.window([0.1, 0.3]) for _ in range(IN_A_ROW)]
    (named,) = slow[-1]
    assert named.rank == 1 and named.times == pytest.approx(3.0)
    assert judge.window([0.1, 0.3]) == []
    assert judge.window([0.1, 0.1]) == [Straggler(1, 1.0, recovered=True)]


def test_stages_of_a_pipeline_are_not_compared_with_one_another():
    judge = Judge(Layout(pp=2, dp=2))
    assert [judge.window([0.1, 0.1, 0.4, 0.4]) for _ in range(5)] == [[]] * 5
    assert [one.rank for _ in range(IN_A_ROW) for one in judge.window([0.1, 0.1, 0.4, 1.0])] == [3]
    assert Judge(Layout(pp=2)).window([0.1, 9.0]) == []


def test_what_a_scheduler_takes_is_no_slowness():
    assert excess(0.003, [0.001]) == 0.0
    assert excess(0.3, []) == 0.0


@pytest.mark.catalogue(20)
def test_a_rank_that_sleeps_is_named_in_a_real_run_although_all_steps_are_as_long(home):
    run = small_run(
        home, layout=Layout(dp=2, zero_stage=2, micro_batch_size=2), steps=20, faults=Faults(straggler_steps=WINDOW)
    )
    train_ranks(run, before_step=sleep_in_forward)
    rows = [json.loads(line) for line in (Path(run.folder) / run.name / "events.jsonl").read_text().splitlines()]
    (named,) = [row for row in rows if row["event"] == "straggler"]
    assert named["rank"] == 1 and named["step"] <= 16
    assert "rank 1 is slow: its own part of the last 12 steps took" in named["cause"]


def sleep_in_forward(trainer: Trainer) -> None:
    if trainer.ranks.rank == 1 and trainer.steps_done == 0:
        forward = trainer.passes.forward

        def slow(*arguments, **at):
            time.sleep(0.15)
            return forward(*arguments, **at)

        trainer.passes.forward = slow  # type: ignore[method-assign]
