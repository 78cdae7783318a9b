"""The learning rate at the edges of every schedule."""

from __future__ import annotations

from functools import partial
from math import cos, pi

import pytest
import torch

from ultrascale.description.run import Optimizer
from ultrascale.train.optimizers.learning_rate import learning_rate

PEAK = 3e-3


def rates(steps: int, **settings) -> list[float]:
    optimizer = Optimizer(learning_rate=PEAK, min_learning_rate_ratio=0.1, **settings)
    return [learning_rate(optimizer, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_in_equal_steps_and_its_last_step_is_the_peak(schedule):
    found = rates(20, schedule=schedule, warmup_steps=4)
    assert found[:4] == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK])


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_step_is_at_the_floor_and_none_is_below_it_or_rises(schedule, warmup):
    found = rates(20, schedule=schedule, warmup_steps=warmup)
    assert found[-1] == pytest.approx(PEAK / 10)
    assert min(found[warmup:]) == found[-1]
    assert sorted(found[warmup:], reverse=True) == found[warmup:]


def test_cosine_and_linear_are_half_way_down_in_the_middle_and_a_quarter_as_their_formulas_say():
    cosine, linear = (rates(24, schedule=schedule, warmup_steps=4) for schedule in ("cosine", "linear"))
    middle, quarter = 4 + 10 - 1, 4 + 5 - 1  # so many of the 20 steps after warm-up are done with these
    assert cosine[middle] == linear[middle] == pytest.approx(PEAK * 0.55)
    assert linear[quarter] == pytest.approx(PEAK * (1 - 0.9 / 4))
    assert cosine[quarter] == pytest.approx(PEAK * (0.1 + 0.9 * (1 + cos(pi / 4)) / 2))


def test_wsd_stays_at_the_peak_until_its_decay_and_then_falls_linearly():
    found = rates(20, schedule="wsd", warmup_steps=2, decay_steps=4)
    assert found[1:16] == [PEAK] * 15
    assert found[16:] == pytest.approx([PEAK * (1 - 0.9 * k / 4) for k in (1, 2, 3, 4)])
    assert rates(20, schedule="wsd")[17:] == pytest.approx([PEAK, PEAK * 0.55, PEAK / 10])  # a tenth of the run


def test_a_decay_longer_than_what_follows_the_warm_up_begins_after_it():
    found = rates(20, schedule="wsd", warmup_steps=4, decay_steps=40)
    assert found[4:] == pytest.approx([PEAK * (1 - 0.9 * k / 16) for k in range(1, 17)])


def test_constant_stays_and_a_run_of_one_step_has_a_rate():
    assert rates(5, schedule="constant") == [PEAK] * 5
    assert [rates(1, schedule=schedule)[0] for schedule in ("constant", "cosine")] == pytest.approx([PEAK, PEAK / 10])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_is_that_of_transformers_next_step(schedule):
    """As docs/training.md says; its linear schedule has no floor, and its wsd warms up from it."""
    transformers = pytest.importorskip("transformers")
    ratio, rate = 0.1 if schedule == "cosine" else 0.0, torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    theirs = {
        "cosine": partial(transformers.get_cosine_with_min_lr_schedule_with_warmup, rate, 4, 20, min_lr_rate=ratio),
        "linear": partial(transformers.get_linear_schedule_with_warmup, rate, 4, 20),
        "wsd": partial(transformers.get_wsd_schedule, rate, 4, 5, num_stable_steps=11, min_lr_ratio=ratio, decay_type="linear"),
    }[schedule]()
    optimizer = Optimizer(
        learning_rate=PEAK, min_learning_rate_ratio=ratio, schedule=schedule, warmup_steps=4,
        decay_steps=5 if schedule == "wsd" else None,
    )  # fmt: skip
    for step in range(20):
        rate.step()
        theirs.step()  # now at step + 1
        assert learning_rate(optimizer, step, 20) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
