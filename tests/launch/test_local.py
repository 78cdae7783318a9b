"""Ranks of this machine under torchrun's agent: killed, stopped, orphaned, and started again when that may help."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import psutil
import pytest
from launch.families import PATIENCE, fork_server_of, launched, left_behind, ranks_of, says_what_rank_0_met, wait_until
from torch.distributed.elastic.multiprocessing import SignalException
from train.small_runs import curve, make_corpus, same, small_run, state, stop_at, train_ranks, whole_rows

from ultrascale.checkpoint import newest_valid
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Faults, Run
from ultrascale.launch import local, stopping
from ultrascale.launch.local import Ending, launch_local
from ultrascale.launch.restarts import account_of
from ultrascale.launch.stopping import SAME_REQUEST_SECONDS, StopRequests, stop_signals_raise

FAILED = Ending("rank 1 failed with exit code 1")
KILLED = Ending("rank 1 was ended by SIGKILL")
WRONG = Ending("rank 0 failed", exit_code=2, explained=True)
STOPPED = Ending("stopped by SIGTERM", stopped=True)
GOOD = Ending("")


def at(ending: Ending, step: int) -> Ending:
    return replace(ending, step=step)


def steps_logged(run: Run) -> int:
    return len(whole_rows(run, "metrics.jsonl"))


def events(run: Run) -> list[str]:
    return [row["event"] for row in event_rows(run)]


def event_rows(run: Run) -> list[dict[str, Any]]:
    """But for ranks that are slower than others, which on a busy machine are any."""
    return [row for row in whole_rows(run, "events.jsonl") if row["event"] != "straggler"]


@pytest.fixture
def endless(tmp_path) -> Run:
    """A run on two ranks that takes longer than the tests."""
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, name="endless", steps=100_000, layout=Layout(dp=2, zero_stage=3, micro_batch_size=2))
    return replace(run, checkpoint=Checkpoint(every_steps=10, keep=3, export=False))


@pytest.mark.catalogue(4, 10)
def test_a_killed_rank_is_started_again_and_a_stop_saves_and_nothing_differs_from_an_undisturbed_run(endless):
    with launched(endless) as process:
        wait_until(lambda: steps_logged(endless) >= 12, process)
        ranks = ranks_of(process)
        listening = {
            c.laddr.ip for rank in [*ranks, psutil.Process(process.pid)] for c in rank.net_connections() if c.status == "LISTEN"
        }
        ranks[1].kill()
        wait_until(lambda: events(endless).count("stepped") == 2 and steps_logged(endless) >= 15, process)
        process.terminate()
        told, code = process.communicate(timeout=PATIENCE)[0], process.returncode
    assert code == 0, told
    failure = event_rows(endless)[2]
    cause = failure["cause"]
    assert cause.startswith("rank 1 was ended by SIGKILL (its last sign of life: ") and says_what_rank_0_met(cause)
    assert f"{cause}; starting again from the newest checkpoint (3 restarts left)" in told
    assert all(word not in told for word in ("Traceback", "death signal", "Terminating process"))
    assert events(endless) == ["start", "stepped", "failure", "start", "stepped", "stop"]
    assert failure["step"] >= 12
    assert f"restart 1: rank 1, node {platform.node()}, step " in told and f"; cause: {cause}" in told and "1 restart, " in told
    assert listening <= {"127.0.0.1", "::1"}
    assert left_behind(endless) == []
    stopped_at = len(curve(endless))
    whole = replace(endless, name="undisturbed")
    train_ranks(whole, before_step=stop_at(stopped_at))
    assert curve(endless) == curve(whole) and same(state(endless), state(whole))


@pytest.mark.catalogue(7)
@pytest.mark.parametrize("steps", [0, 2], ids=["while it imports", "while ranks train"])
def test_a_killed_fork_server_is_started_again_with_its_ranks_and_named(endless, steps):
    """The kernel may choose it where memory runs out. What its ranks can still save, they do."""
    with launched(endless) as process:
        wait_until(lambda: fork_server_of(process) is not None and steps_logged(endless) >= steps, process)
        server = fork_server_of(process)
        assert server is not None
        server.kill()
        wait_until(lambda: "stepped" in dropwhile(lambda event: event != "failure", events(endless)), process)
        process.terminate()
        told, code = process.communicate(timeout=PATIENCE)[0], process.returncode
    assert code == 0 and "Traceback" not in told and "Error" not in told, told
    failure = next(row for row in event_rows(endless) if row["event"] == "failure")
    assert failure["cause"].startswith("the fork server, which the ranks come from, was ended by SIGKILL")
    assert len(curve(endless)) == event_rows(endless)[-1]["step"] and left_behind(endless) == []


@pytest.mark.catalogue(14)
def test_a_second_command_for_a_live_run_is_refused_and_the_run_never_knows_of_it(endless):
    other = replace(endless, steps=99_999, optimizer=replace(endless.optimizer, learning_rate=0.9))
    file = Path(endless.folder) / "other.toml"
    file.write_text(to_toml(other))
    with launched(endless) as process:
        wait_until(lambda: steps_logged(endless) >= 12, process)
        words = [sys.executable, "-m", "ultrascale", "train", str(file)]
        second = subprocess.run(
            words, text=True, capture_output=True, timeout=PATIENCE, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        ranks_of(process)[1].kill()
        wait_until(lambda: events(endless).count("stepped") == 2, process)
        process.terminate()
        told = process.communicate(timeout=PATIENCE)[0]
    assert second.returncode == 2 and "another process is training in this folder" in second.stderr, second.stderr
    assert "learning_rate" not in told and "steps:" not in told, told
    assert events(endless) == ["start", "stepped", "failure", "start", "stepped", "stop"]
    assert "1 restart, " in told and "SIGKILL" in event_rows(endless)[2]["cause"]
    assert resolve(Path(endless.folder) / endless.name).run.optimizer == endless.optimizer


@pytest.mark.catalogue(12)
@pytest.mark.parametrize(
    "number, times, group",
    [(signal.SIGHUP, 1, False), (signal.SIGTERM, 3, False), (signal.SIGUSR1, 1, True), (signal.SIGTERM, 200, True)],
    ids=["SIGHUP", "SIGTERM three times", "SIGUSR1 to all", "SIGTERM to all until the last has left"],
)
def test_every_wish_to_stop_is_one_save_and_one_end(endless, number, times, group):
    """To all: as a terminal that closes, a service and a batch system do. The fork server is one of them. All within four
    seconds, so that a slow machine has six more to deliver them as one wish."""
    assert SAME_REQUEST_SECONDS >= 10
    with launched(endless) as process:
        wait_until(lambda: steps_logged(endless) >= 2, process)
        family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        until = time.monotonic() + 4.0
        for _ in range(times):
            if time.monotonic() > until:
                break
            for pid in family if group else family[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.1 if times < 10 else 0.02)
        told, code = process.communicate(timeout=PATIENCE)[0], process.returncode
    assert code == 0 and "saved; the same command goes on from here" in told, told
    assert "Traceback" not in told and "spawn.py" not in told, told
    assert events(endless) == ["start", "stepped", "stop"]
    folder = Path(endless.folder) / endless.name / "checkpoints"
    assert f"step-{event_rows(endless)[-1]['step']:08}" == max(path.name for path in folder.glob("step-*"))


@pytest.mark.catalogue(11)
def test_a_stop_while_a_collective_hangs_ends_within_the_time_outs_and_leaves_the_checkpoint_before(endless):
    endless = replace(endless, faults=Faults(hang_seconds=3.0))
    with launched(endless) as process:
        wait_until(lambda: steps_logged(endless) >= 12, process)
        ranks_of(process)[1].suspend()  # the other now waits in a collective, where Python runs no handler
        process.terminate()
        told, code = process.communicate(timeout=PATIENCE)[0], process.returncode
    assert code == 1 and "stopped by SIGTERM, and the ranks ended without saving" in told, told
    assert [(row["event"], row["again"]) for row in event_rows(endless)[-1:]] == [("failure", False)]
    assert "hang: no sign of life in step" in told and "stopped by a signal (SIGSTOP" in told and "Traceback" not in told, told
    found = newest_valid(Path(endless.folder) / endless.name / "checkpoints")
    assert found is not None and int(found.name[5:]) >= 10
    whole = replace(endless, name="undisturbed")
    for run in (endless, whole):
        train_ranks(run, before_step=stop_at(int(found.name[5:]) + 10))
    assert curve(endless) == curve(whole) and same(state(endless), state(whole))


def test_a_stop_whose_last_save_fails_ends_with_1_and_the_reason(endless):
    endless = replace(endless, checkpoint=Checkpoint(every_steps=None, export=False))
    checkpoints = Path(endless.folder) / endless.name / "checkpoints"
    with launched(endless) as process:
        wait_until(lambda: steps_logged(endless) >= 2, process)
        checkpoints.rmdir()
        checkpoints.write_text("in the way")
        process.terminate()
        told, code = process.communicate(timeout=PATIENCE)[0], process.returncode
    assert code == 1, told
    assert "error on rank 0" in told and str(checkpoints) in told and "Traceback" not in told


def test_ranks_that_a_stop_ends_before_they_saved_are_told(tmp_path):
    failure, saved = tmp_path / "failure.json", tmp_path / "saved"
    for number, code in ((signal.SIGTERM, 1), (signal.SIGINT, 130)):
        ending = local._stopped(number, failure, saved)
        assert ending.exit_code == code and ending.reason.endswith("and the ranks ended without saving")
    saved.touch()
    assert local._stopped(signal.SIGTERM, failure, saved) == replace(STOPPED, saved=True)


@pytest.mark.catalogue(16)
def test_ranks_whose_launcher_is_killed_stop_by_themselves(endless):
    """Within ten seconds, on a machine that lets them: `test_ends`."""
    with launched(endless) as process:
        wait_until(lambda: steps_logged(endless) >= 2, process)
        ranks = ranks_of(process)
        process.kill()
        until = time.monotonic() + PATIENCE / 2
        while any(is_alive(rank) for rank in ranks) and time.monotonic() < until:
            time.sleep(0.1)
        alive = [rank for rank in ranks if is_alive(rank)]
        for rank in alive:
            rank.kill()
    assert len(ranks) == 2 and alive == []


def is_alive(rank: psutil.Process) -> bool:
    """One that has ended is there as long as the fork server, its parent, has not looked."""
    with suppress(psutil.NoSuchProcess):
        return rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
    return False


AGAIN = {
    "good": ([GOOD], [], 1, GOOD),
    "gets on": ([KILLED, FAILED, GOOD], ["10", "20"], 3, GOOD),
    "budget": ([at(KILLED, step) for step in range(11, 20)], ["10"] * 9, 4, at(KILLED, 14)),
    "poison step": ([at(FAILED, 17)] * 9, ["10"] * 9, 3, at(FAILED, 17)),
    "poison that kills": ([at(KILLED, 17)] * 9, ["10"] * 9, 3, at(KILLED, 17)),
    "progress": ([*[at(FAILED, step) for step in range(9)], GOOD], list("123456789"), 10, GOOD),
    "start": ([FAILED] * 9, ["10"] * 9, 3, FAILED),
    "wrong": ([WRONG] * 9, [], 1, WRONG),
    "stopped": ([KILLED, STOPPED], ["10"], 2, STOPPED),
}
"""How attempts end, the newest checkpoint after each, how many there are, and how the command ends."""


@pytest.mark.catalogue(8, 9)
@pytest.mark.parametrize("endings, progress, attempts, ending", AGAIN.values(), ids=AGAIN)
def test_a_run_is_started_again_only_where_that_may_help(attempts_end, endings, progress, attempts, ending):
    left, reports = list(endings), list(progress)

    def attempt(*arguments: object) -> Ending:
        assert left, "started again and again"
        return left.pop(0)

    attempts_end(attempt)
    found = launch_local("", 2, say=lambda text: None, progress=lambda: reports.pop(0))
    assert (found.rank, found.step, found.exit_code, len(endings) - len(left)) == (
        ending.rank, ending.step, ending.exit_code, attempts,
    )  # fmt: skip
    assert found.reason.startswith(ending.reason)


@pytest.mark.parametrize("ending, recorded", [(WRONG, 0), (at(WRONG, 3), 1), (replace(WRONG, exit_code=1), 0), (FAILED, 3)])
def test_what_the_ranks_refuse_before_any_step_is_no_failure_of_the_run(attempts_end, ending, recorded):
    events: list[dict[str, Any]] = []
    attempts_end(lambda *arguments: ending)
    launch_local("", 2, say=lambda text: None, record=events.append)
    assert [event["event"] for event in events] == ["failure"] * recorded


@pytest.mark.parametrize("before", [at(KILLED, 50), FAILED])
def test_what_the_ranks_refuse_after_an_attempt_that_failed_is_a_failure_too(attempts_end, before):
    endings, events = [before, WRONG], []
    attempts_end(lambda *arguments: endings.pop(0))
    found = launch_local("", 2, say=lambda text: None, record=events.append)
    assert (found.reason, found.refused) == (WRONG.reason, False)
    assert [(row["event"], row["step"], row["again"]) for row in events] == [
        ("failure", before.step, True), ("failure", None, False),
    ]  # fmt: skip
    (restart,) = account_of([{"event": "start", "time": 0.0, "step": 40}, *events]).restarts
    assert restart.failed_step == (before.step or 0)


@pytest.mark.catalogue(8)
def test_a_step_that_fails_again_and_again_is_named_as_the_reason_to_stop(attempts_end):
    attempts_end(lambda *arguments: at(FAILED, 17))
    recorded: list[dict[str, Any]] = []
    found = launch_local("", 2, say=lambda text: None, record=recorded.append)
    assert (
        found.reason == "rank 1 failed with exit code 1. Step 17 has now failed 3 times in a row: once more would be no better"
    )
    assert [(row["event"], row["step"], row["rank"]) for row in recorded] == [("failure", 17, None)] * 3
    assert [row["again"] for row in recorded] == [True, True, False]


def test_a_stop_without_a_save_is_an_event_of_the_run(attempts_end):
    attempts_end(lambda *arguments: at(STOPPED, 7))
    recorded: list[dict[str, Any]] = []
    launch_local("", 2, record=recorded.append)
    assert [(row["event"], row["step"], row["cause"], row["again"]) for row in recorded] == [
        ("failure", 7, "stopped by SIGTERM", False)
    ]
    started = [{"event": "start", "time": when, "step": 5} for when in (0.0, recorded[0]["time"] + 9.0)]
    (restart,) = account_of([started[0], *recorded, started[1]]).restarts
    assert (restart.cause, restart.steps_lost) == ("stopped by SIGTERM", 2)


@pytest.mark.catalogue(10)
def test_a_stop_between_two_attempts_ends_the_command_and_starts_no_rank_again(attempts_end, clock_of, handled_before):
    """And for as long as it may be the same wish, another one does nothing; after that it does what it did before."""
    clock = clock_of(stopping)
    attempts: list[int] = []

    def fail(*arguments: object) -> Ending:
        attempts.append(len(attempts))
        return at(KILLED, 7)

    attempts_end(fail)
    recorded: list[dict[str, Any]] = []
    said: list[str] = []

    def say_and_stop(text: str) -> None:
        said.append(text)
        signal.raise_signal(signal.SIGTERM)

    found = launch_local("", 2, max_restarts=1, say=say_and_stop, record=recorded.append)
    assert (found.reason, found.stopped, found.saved) == ("stopped by SIGTERM before the ranks were started again", True, False)
    assert attempts == [0] and said == [f"{KILLED.reason}; starting again from the newest checkpoint (1 restart left)"]
    assert [(row["cause"], row["step"], row["again"]) for row in recorded] == [
        (KILLED.reason, 7, True),
        (found.reason, 7, False),
    ]
    clock.now += SAME_REQUEST_SECONDS
    signal.raise_signal(signal.SIGTERM)
    assert handled_before == []
    clock.now += SAME_REQUEST_SECONDS + 1.0
    signal.raise_signal(signal.SIGTERM)
    assert handled_before == [signal.SIGTERM]


@pytest.fixture
def handled_before() -> Iterator[list[int]]:
    """The SIGTERMs that were left to whoever handled them before."""
    taken: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    yield taken
    signal.signal(signal.SIGTERM, before)


def test_a_stop_that_comes_as_the_next_attempt_begins_is_passed_on_at_once():
    stop_requests = StopRequests(signal.SIGTERM)
    with pytest.raises(SignalException) as raised, stop_signals_raise(stop_requests):
        pytest.fail("ranks were started")
    assert raised.value.sigval == signal.SIGTERM


@pytest.mark.catalogue(8, 9)
@pytest.mark.parametrize(
    "max_restarts, words",
    [
        (1, "1 restart since the last new checkpoint: no more are allowed (--max-restarts)"),
        (5, "Step 6 has now failed 3 times in a row: once more would be no better"),
    ],
    ids=["budget", "poison step"],
)
def test_a_run_that_cannot_get_on_ends_with_the_reason_and_the_same_command_goes_on_once_it_can(endless, max_restarts, words):
    run = replace(endless, steps=12, checkpoint=replace(endless.checkpoint, every_steps=6))
    file = Path(run.folder) / "run.toml"
    file.write_text(to_toml(run))
    command = [sys.executable, "-m", "ultrascale", "train", str(file), "--processes", "2", "--max-restarts", str(max_restarts)]
    calm = os.environ | {"OMP_NUM_THREADS": "1"}
    faulty = calm | {"ULTRASCALE_FAILPOINT": "save.start:0:1"}
    ended = subprocess.run(command, env=faulty, text=True, capture_output=True, timeout=PATIENCE)
    assert ended.returncode == 1 and words in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    attempts = min(max_restarts + 1, 3)
    failures = [(row["rank"], row["step"], row["again"]) for row in event_rows(run) if row["event"] == "failure"]
    assert failures == [(0, 6, number < attempts) for number in range(1, attempts + 1)]
    assert subprocess.run(command, env=calm, capture_output=True, timeout=PATIENCE).returncode == 0
    whole = replace(run, name="undisturbed")
    train_ranks(whole)
    assert curve(run) == curve(whole) and same(state(run), state(whole))
