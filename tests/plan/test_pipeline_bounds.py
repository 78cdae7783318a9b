"""Closed forms against the simulator."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.pipeline.pipeline_bounds import ENOUGH, bubble_seconds
from ultrascale.plan.pipeline.play import StageSeconds, play, program_of
from ultrascale.schedules.build import builder_of

times = st.floats(0.05, 3.0)
sizes = {
    "name": st.sampled_from(sorted(SCHEDULES)),
    "pp": st.integers(1, 8),
    "count": st.integers(1, 40),
    "virtual": st.integers(1, 4),
}


def sized(name, pp, virtual):
    """An even number of ranks where the schedule wants one; stages a rank where it takes any."""
    return pp + (pp % 2 if name == "dualpipe" else 0), virtual if SCHEDULES[name].virtual_stages is None else None


def is_exact(name, pp, count):
    enough = ENOUGH.get(builder_of(name))
    return enough is None or bool(enough(np.asarray(pp), np.asarray(count)))


def step_seconds(name, pp, virtual, count, forward, inputs, weights, *, send=0.0, pair_saving=0.0):
    """What a rank computes, and its bubble. `pair_saving`: what a forward and a backward at once (DualPipe) save."""
    work = count * SCHEDULES[name].stages_a_rank(virtual) * (forward + inputs + weights)
    if name in ("dualpipe", "dualpipe-v"):
        depth, stream = (pp // 2, count // 2) if name == "dualpipe" else (pp, count)
        work -= max(2 * stream - depth - 2, 0) * pair_saving
    return work + bubble_seconds(name, pp, virtual, count, forward, inputs, weights, send=send)


@settings(max_examples=300, deadline=None)
@given(**sizes, forward=times, inputs=times, weights=times)
def test_even_stages_take_what_the_closed_form_says(name, pp, count, virtual, forward, inputs, weights):
    pp, virtual = sized(name, pp, virtual)
    played = play(program_of(name, pp, count, virtual), StageSeconds(forward, inputs, weights)).step_seconds
    said = step_seconds(name, pp, virtual or 1, count, forward, inputs, weights)
    if is_exact(name, pp, count):
        assert said == pytest.approx(played, rel=1e-9)
    else:
        assert said <= played * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(**sizes, forward=times, inputs=times, weights=times, send=st.floats(0.0, 3.0))
def test_with_messages_the_closed_form_is_the_step_or_less(name, pp, count, virtual, forward, inputs, weights, send):
    pp, virtual = sized(name, pp, virtual)
    played = play(program_of(name, pp, count, virtual), StageSeconds(forward, inputs, weights, send)).step_seconds
    said = step_seconds(name, pp, virtual or 1, count, forward, inputs, weights, send=send)
    assert said <= played * (1 + 1e-9)
    if name in ("afab", "1f1b"):
        assert said == pytest.approx(played, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(**sizes, forward=times, inputs=times, weights=times, part=st.floats(0.0, 0.02))
def test_short_messages_cost_what_the_closed_form_says(name, pp, count, virtual, forward, inputs, weights, part):
    pp, virtual = sized(name, pp, virtual)
    assume(is_exact(name, pp, count))
    send = part * min(forward, inputs, weights) / count
    played = play(program_of(name, pp, count, virtual), StageSeconds(forward, inputs, weights, send)).step_seconds
    said = step_seconds(name, pp, virtual or 1, count, forward, inputs, weights, send=send)
    assert said == pytest.approx(played, abs=send + 1e-9 * played)


def test_columns_broadcast_and_are_as_published():
    pp = np.array([2, 4, 8, 16])
    assert bubble_seconds("1f1b", pp, 1, 64, 1.0, 1.0, 1.0).tolist() == [3, 9, 21, 45]
    assert bubble_seconds("interleaved", pp, 4, 64, 0.25, 0.25, 0.25).tolist() == [0.75, 2.25, 5.25, 11.25]
    assert bubble_seconds("zb-h1", pp, 1, 64, 1.0, 1.0, 1.0).tolist() == [1, 3, 7, 15]
    assert bubble_seconds("zb-v", pp, 2, 64, 0.5, 0.5, 0.5).tolist() == [0.5, 1.5, 3.5, 7.5]
    assert bubble_seconds("dualpipe", pp, 1, 64, 1.0, 1.0, 1.0).tolist() == [0, 2, 6, 14]


def test_what_pairs_hide_shortens_the_step_by_as_many_pairs_as_are_on_the_longest_path():
    for name, pp, count in (("dualpipe", 4, 16), ("dualpipe", 8, 20), ("dualpipe-v", 3, 12), ("dualpipe-v", 5, 10)):
        hidden = StageSeconds(1.0, 1.0, 1.0, forward_communication=0.2, backward_communication=0.2)
        played = play(program_of(name, pp, count), hidden).step_seconds
        # Computing 3 - 0.4, communication 0.4: a pair takes the first, one after the other takes 3.
        assert step_seconds(name, pp, 2, count, 1.0, 1.0, 1.0, pair_saving=0.4) == pytest.approx(played, rel=1e-12)
