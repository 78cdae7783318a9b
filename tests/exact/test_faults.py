"""Every planted fault is seen, in the least run that can have it, and that run without it is exact."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from ultrascale.check.cases import smallest_run_of
from ultrascale.check.compare import Verdict
from ultrascale.check.faults.all_faults import CLASSIC
from ultrascale.check.faults.table import FAULTS, expect_fault, suitable
from ultrascale.check.prove import Case, prove_all
from ultrascale.description.problems import SpecError

LIMIT = 1e-11
SEEN_IN = {
    "local-clip": "weight", "stale-copy": "loss", "drifting-replica": "copies", "decayed-norms": "weight",
    "step-forgotten": "weight", "pp-tied-updated-twice": "copies", "router-counts-overwritten": "experts",
    "router-counts-twice": "experts", "expert-bias-local": "experts", "norm-overcount": "gradient norm",
    "norm-of-replicas": "gradient norm", "tied-norm-twice": "gradient norm", "norm-without-experts": "gradient norm",
    "norm-without-sinks": "gradient norm", "norm-of-mirrors": "gradient norm",
}  # fmt: skip
"""What gives a fault away, where it is not the gradients. A norm that is wrong leaves them right."""
FIRST_SEEN_IN_THE_SECOND_STEP = {"stale-copy", "step-forgotten"}


pytestmark = pytest.mark.timeout(900)
"""The first test proves for all."""


@cache
def proven() -> tuple[dict[str, Verdict], dict[str, Verdict]]:
    """The verdict on each fault, and on each run without one, by the name of the first fault that it is home to."""
    planted = [Case(name, smallest_run_of(name), name) for name in FAULTS]
    controls = {repr(case.run): Case(f"control of {case.name}", case.run) for case in reversed(planted)}
    verdicts = prove_all([*controls.values(), *planted], steps=2, go_on=True)
    return (
        {verdict.case: verdict for verdict in verdicts if verdict.case in FAULTS},
        {verdict.case: verdict for verdict in verdicts if verdict.case not in FAULTS},
    )


def test_there_are_more_than_the_promised_25_on_every_axis():
    axes = Counter(
        axis for name in FAULTS for axis in ("dp", "tp", "cp", "pp", "ep") if getattr(smallest_run_of(name).layout, axis) > 1
    )
    assert len(FAULTS) >= 25 and min(axes[axis] for axis in ("dp", "tp", "cp", "pp", "ep")) >= 6
    assert all(fault.what and fault.needs and fault.fits(smallest_run_of(name)) for name, fault in FAULTS.items())


def test_the_runs_that_faults_are_planted_in_are_exact_without_them():
    _, controls = proven()
    assert {name: verdict.failure or verdict.beyond for name, verdict in controls.items() if not verdict.holds} == {}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_where_it_should_be(name):
    verdict = proven()[0][name]
    assert verdict.failure == ""  # seen in the numbers, not because something broke
    assert not verdict.holds
    seen = {difference.quantity for difference in verdict.beyond}
    assert SEEN_IN.get(name, "gradient") in seen
    assert min(difference.step for difference in verdict.beyond) == (name in FIRST_SEEN_IN_THE_SECOND_STEP)
    assert max(difference.error for difference in verdict.beyond) > 10 * LIMIT


@pytest.mark.parametrize("name", [name for name, quantity in SEEN_IN.items() if quantity != "loss"])
def test_a_fault_after_the_gradients_leaves_the_first_steps_gradients_right(name):
    first = {difference.quantity for difference in proven()[0][name].beyond if difference.step == 0}
    assert "gradient" not in first and "loss" not in first


def test_a_run_can_have_only_faults_of_its_own_axes():
    data = suitable(smallest_run_of("missing-reduce"))
    assert set(CLASSIC) < set(data) and not any(name.startswith(("tp-", "cp-", "pp-", "expert-")) for name in data)
    with pytest.raises(SpecError, match="cp-order needs cp > 1"):
        expect_fault("cp-order", smallest_run_of("missing-reduce"))
    with pytest.raises(SpecError, match="Did you mean missing-reduce"):
        expect_fault("mising-reduce", smallest_run_of("missing-reduce"))
