"""The watchdog, then collectives, then the end of the grace period: in this order by default, and told where it is another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from train.small_runs import MODEL

from ultrascale.config.rules.run_rules import run_notes
from ultrascale.config.rules.time_limits import GRACE_SECONDS, TORCHRUN_GRACE, grace_notes, grace_seconds
from ultrascale.description.layout import Layout
from ultrascale.description.run import Faults, Run

RUN = Run(model=MODEL, layout=Layout(dp=2))


def test_by_default_the_watchdog_speaks_before_collectives_give_up_and_they_before_a_stopped_run_is_killed():
    assert RUN.faults.hang_seconds is not None
    assert RUN.faults.hang_seconds < RUN.collective_timeout_seconds < grace_seconds(RUN) == GRACE_SECONDS == 120.0
    assert run_notes(RUN) == []


@pytest.mark.parametrize("timeout", [1.0, 100.0, 100.5, 600.0, 2e6])
def test_the_grace_of_our_launcher_is_longer_than_any_collective(timeout):
    run = replace(RUN, collective_timeout_seconds=timeout)
    assert grace_seconds(run) >= timeout + 20
    assert any("let no batch system kill" in note for note in run_notes(run)) == (timeout > 100)


def test_a_watchdog_that_comes_after_the_time_out_is_told_and_none_at_all_is_not():
    (note,) = run_notes(replace(RUN, faults=Faults(hang_seconds=100.0)))
    assert note.startswith("faults.hang_seconds = 100 is not below collective_timeout_seconds = 100")
    assert run_notes(replace(RUN, faults=Faults(hang_seconds=None))) == []
    assert run_notes(replace(RUN, layout=Layout(), faults=Faults(hang_seconds=100.0))) == []


@pytest.mark.parametrize(
    "given, told",
    [({}, True), ({TORCHRUN_GRACE: "100"}, True), ({TORCHRUN_GRACE: "soon"}, True), ({TORCHRUN_GRACE: "101"}, False)],
)
def test_a_torchrun_that_kills_before_collectives_give_up_is_told_with_what_to_set(given, told):
    notes = grace_notes(RUN, given | {"TORCHELASTIC_RUN_ID": "x"})
    assert [f"Start torchrun with {TORCHRUN_GRACE}=120." in note for note in notes] == [True] * told
    assert grace_notes(RUN, given) == grace_notes(replace(RUN, layout=Layout()), {"TORCHELASTIC_RUN_ID": "x"}) == []
