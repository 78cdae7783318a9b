"""Loss curves of every precision and optimizer: as recorded, near fp32's, and a planted fault is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gold.curves import CURVES, NO_SCALE, PREFIX, STEPS, furthest, recorded, train

from ultrascale.kernels.optimizers import block_quantise as stochastic
from ultrascale.kernels.optimizers.narrow_moments import SECOND, round_trip

SAME_LOSS, SAME_NORM = 0.01, 0.02
"""Nats, and a share of the norm: between machines whose products round otherwise, over the first steps."""
ANOTHER_CPU = 0.03
"""Nats that a whole curve may lie further off where products in bf16 are summed in another order than on the record's Xeon with
AMX, so that spikes come at other steps. On an EPYC the curve whose gradients are reduced in bf16 does by 0.027."""
BEFORE_SPIKES = 10
"""Steps of which each norm is held to that. Then there are single steps in which it is many times that of its neighbours and
decided by rounding: in the record the fifteenth's is 2.9 in fp32, 2.1 in bf16 and 1.5 in fp8."""
RERUN = [name for name, curve in CURVES.items() if curve.run.layout.world_size == 1]


@pytest.mark.parametrize("name", CURVES)
def test_the_recorded_curve_is_as_near_to_fp32_as_stated(name):
    found, curve = recorded(), CURVES[name]
    losses = found[name].losses
    assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
    above, below = furthest(found[name].losses, found[curve.against].losses)
    assert above <= curve.beyond and (curve.below is None or below <= curve.below)


@pytest.mark.parametrize("name", RERUN)
def test_the_first_steps_are_those_of_the_record(name):
    found, kept = train(CURVES[name].run, PREFIX), recorded()[name]
    assert np.abs(np.subtract(found.losses, kept.losses[:PREFIX])).max() < SAME_LOSS
    apart = np.abs(np.divide(found.norms, kept.norms[:PREFIX]) - 1)
    assert apart[:BEFORE_SPIKES].max() < SAME_NORM and np.median(apart) < SAME_NORM


@pytest.mark.nightly
@pytest.mark.parametrize("name", CURVES)
def test_the_whole_curve_is_as_near_to_the_recorded_fp32_as_stated(name):
    curve = CURVES[name]
    above, below = furthest(train(curve.run, STEPS).losses, recorded()[curve.against].losses)
    assert above <= curve.beyond + ANOTHER_CPU and (curve.below is None or below <= curve.below + ANOTHER_CPU)


# --- planted faults -------------------------------------------------------------------------------------------------------


def test_fp16_without_loss_scaling_leaves_the_record():
    """At the gradients of a step of four million tokens, which 1,024 tokens with so small a factor have."""
    found = train(replace(CURVES["fp16"].run, loss_scale=NO_SCALE), PREFIX)
    assert furthest(found.losses, recorded()["fp32"].losses[:PREFIX])[0] > 5 * CURVES["fp16"].beyond


def second_moment(updates: int) -> float:
    """Mean of a second moment in bf16 after so many gradients of 1; beta2 = 0.999."""
    values = torch.zeros(8, 64)
    for update in range(updates):
        values = round_trip(values * 0.999 + 0.001, "bf16", SECOND, stochastic.rounding_key(0, update, "w", SECOND))
    return float(values.mean())


def test_second_moments_in_bf16_follow_changes_below_their_spacing():
    """Rounded to the nearest they would stop at less than half."""
    updates = 1000
    assert second_moment(updates) == pytest.approx(1 - 0.999**updates, rel=0.03)
