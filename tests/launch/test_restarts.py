"""What restarts have cost, from the events of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        "restart 1: rank 1, node here, step 13, 3 steps lost, 5.0 s until the next step was done; "
        "cause: rank 1 was ended by SIGKILL",
        "1 restart, 3 steps lost, goodput 71.4% of 28 s",
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


def test_rows_that_cannot_be_read_are_passed_over_and_counted_and_a_run_without_events_has_no_account(tmp_path):
    path = tmp_path / "events.jsonl"
    assert summary(read_account(path)) == []
    odd = [
        '{"time": 3, "ev', "[]", "7", '{"time": 3}', '{"event": "start", "time": "noon", "step": 3}',
        '{"event": "start", "time": 9}', '{"event": "stop", "time": NaN, "step": 3}',
        '{"event": "stepped", "time": 3, "step": "3"}', "[" * 100_000, '{"event": "rewind", "time": 3, "step": 3}',
        '{"event": "failure", "time": 3, "cause": 5}', "9" * 5000,
    ]  # fmt: skip
    good = [json.dumps(one) for one in EVENTS]
    for_people = json.dumps(event(3.0, "straggler", 4, cause="slow"))
    path.write_text("\n".join([*good[:3], *odd, for_people, "", *good[3:]]))
    assert read_account(path) == replace(account_of(EVENTS), unreadable=len(odd))
    assert summary(read_account(path))[-1] == "12 rows of events.jsonl cannot be read and are left out of this account"


def with_clock(events: list[dict], boot: str = "b") -> list[dict]:
    return [row | {"monotonic": 100 + row["time"], "boot": boot} for row in events]


def set_clock(events: list[dict], by: float) -> list[dict]:
    """The wall clock is set between the first step and the failure."""
    return [row | {"time": row["time"] + by * (number > 1)} for number, row in enumerate(events)]


@pytest.mark.catalogue(62)
@pytest.mark.parametrize("by", [-800.0, 5000.0])
def test_a_clock_that_is_set_changes_nothing_where_the_machine_has_another(by):
    assert account_of(set_clock(with_clock(EVENTS), by)) == account_of(EVENTS)


@pytest.mark.catalogue(62)
def test_a_clock_that_is_set_back_is_told_where_there_is_no_other():
    account = account_of(set_clock(EVENTS, -800.0))
    assert account.goodput is None and account.wall_seconds == 14.0  # from the failure on
    assert summary(account)[-1] == "1 restart, 3 steps lost, goodput unknown: the clock was set back (1 time)"
    other_boot = set_clock([*with_clock(EVENTS[:2]), *with_clock(EVENTS[2:], "c")], -800.0)
    assert account_of(other_boot) == account


def test_time_after_the_launcher_gave_up_does_not_count(tmp_path):
    late = [row | {"time": row["time"] + 5000 * (number > 2)} for number, row in enumerate(EVENTS)]
    late[2] = late[2] | {"again": False}
    account = account_of(late)
    assert (account.wall_seconds, account.restarts[0].seconds, account.steps_lost) == (24.0, None, 3)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), st.lists, max_leaves=3)
ROWS = st.fixed_dictionaries(
    {"event": st.sampled_from(["start", "stepped", "failure", "rewind", "stop", "end"]), "time": st.integers(0, 99) | JSON},
    optional={
        "step": st.integers(0, 50) | JSON, "to": st.integers(0, 50) | JSON, "rank": JSON, "node": JSON, "cause": JSON,
        "monotonic": st.integers(0, 99) | JSON, "boot": st.sampled_from("ab") | JSON, "again": JSON,
    },
)  # fmt: skip


@given(st.lists(ROWS | JSON, max_size=12))
def test_whatever_rows_there_are_the_account_is_told_and_its_numbers_can_be(rows):
    account = account_of(rows)
    assert account.wall_seconds >= 0 and account.useful_seconds >= 0
    assert account.goodput is None or 0 <= account.goodput <= 1
    assert all(one.steps_lost >= 0 and (one.seconds or 0) >= 0 for one in account.restarts)
    assert len(summary(account)) == bool(account.restarts) + len(account.restarts) + bool(account.unreadable)
