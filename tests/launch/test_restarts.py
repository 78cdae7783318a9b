"""What restarts have cost, from the events of a run."""

from __future__ import annotations

import json

import pytest

from ultrascale.launch.restarts import account_of, read_account, summary


def event(time: float, kind: str, step: int | None, **more: object) -> dict:
    return {"time": time, "event": kind, "step": step, **more}


FAILURE = {"rank": 1, "node": "here", "cause": "rank 1 was ended by SIGKILL"}
EVENTS = [
    event(0.0, "start", 0),
    event(2.0, "stepped", 1),
    event(14.0, "failure", 13, **FAILURE),  # 12 steps in 12 s
    event(18.0, "start", 10),
    event(19.0, "stepped", 11),
    event(28.0, "end", 20),  # 9 steps in 9 s
]


def test_a_restart_is_told_with_its_cause_the_steps_and_the_time_it_cost():
    account = account_of(EVENTS)
    (restart,) = account.restarts
    assert (restart.rank, restart.failed_step, restart.resumed_step, restart.steps_lost) == (1, 13, 10, 3)
    assert restart.seconds == 5.0
    assert account.wall_seconds == 28.0
    assert account.useful_seconds == pytest.approx(20.0)  # 20 steps at 1 s
    assert summary(account) == [
        "restart 1: rank 1 was ended by SIGKILL; step 13, 3 steps done again, 5.0 s until the next step was done",
        "1 restarts, 3 steps done again, goodput 71.4% of 28 s",
    ]


def test_time_between_two_commands_does_not_count_and_a_stop_is_no_restart():
    later = [event(1000.0, "start", 20), event(1001.0, "stepped", 21), event(1010.0, "stop", 30)]
    account = account_of([*EVENTS, *later])
    assert account.wall_seconds == 38.0 and len(account.restarts) == 1
    assert account.useful_seconds == pytest.approx(30.0)


def test_a_launcher_that_was_killed_left_no_failure_and_counts_as_a_restart_of_unknown_time():
    account = account_of([*EVENTS[:2], *EVENTS[3:]])
    (restart,) = account.restarts
    assert restart.cause == "the launcher ended without a word" and restart.seconds is None


def test_ranks_that_fail_before_they_start_count_too():
    again = [event(15.0, "failure", None, **FAILURE), event(16.0, "failure", None, **FAILURE)]
    assert len(account_of([*EVENTS[:3], *again, *EVENTS[3:]]).restarts) == 3


def test_torn_lines_are_passed_over_and_a_run_without_events_has_no_account(tmp_path):
    path = tmp_path / "events.jsonl"
    assert summary(read_account(path)) == []
    path.write_text("".join(f"{json.dumps(one)}\n" for one in EVENTS) + '{"time": 3, "ev')
    assert read_account(path) == account_of(EVENTS)
