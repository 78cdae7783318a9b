"""How ranks and launchers end, at the price of a fork: what is named, who outlives whom, and where the next attempt meets."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from planted import fails

from ultrascale.description.layout import Layout
from ultrascale.heartbeat import HeartbeatWriter
from ultrascale.launch import local, orphans
from ultrascale.launch.forked import RankFailed, run_forked
from ultrascale.launch.local import Ending, launch_local
from ultrascale.launch.orphans import end_with_launcher, end_with_starter, launcher_here
from ultrascale.parallel import arrival
from ultrascale.parallel.mesh import process_group

# --- the next attempt --------------------------------------------------------------------------------------------------------


LATE_SECONDS = 1.0
"""Of rank 1, in which a rank 0 that does not wait for it has gone on. The control, which ends there, has more time for that."""


def meet_and_die(rendezvous: str, folder: str, dies: bool) -> list[float]:
    """Ranks that meet as the launcher has them meet, in its folder for the attempt. Rank 1 dies; or else it is late, and rank 0
    must not go on without it. (What follows from addresses of dead ranks is up to chance: torch meets, fails or hangs.)"""
    late, waits, comes = os.environ["RANK"] == "1" and not dies, Path(folder) / "waits", Path(folder) / "comes"
    wait_for_all = arrival.wait_for_all

    def wait_and_look(*places: Any) -> None:
        waits.touch()
        wait_for_all(*places)
        assert dies or comes.exists(), "rank 0 went on before rank 1 had come"

    arrival.wait_for_all = wait_and_look
    if late:
        while not waits.exists():
            time.sleep(0.01)
        time.sleep(LATE_SECONDS)
        comes.touch()
    with process_group(Layout(dp=2), device="cpu", timeout_seconds=30.0, rendezvous=f"file://{folder}/store") as ranks:
        if dies and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return ranks.sum(torch.ones(1)).tolist()


@pytest.mark.catalogue(4)
def test_after_a_kill_ranks_meet_in_a_store_of_their_own(attempts_end, one_for_all: Path | None = None):
    attempts: list[Any] = []

    def attempt(asked: local.Attempt, folder: Path, *others: object) -> Ending:
        attempts.append(None)
        place = str(one_for_all or folder)
        try:
            attempts[-1] = run_forked(asked.num_processes, meet_and_die, place, len(attempts) == 1)
        except RankFailed as error:
            return Ending(str(error))
        return Ending("")

    attempts_end(attempt)
    assert launch_local("", 2, max_restarts=1, say=lambda text: None).reason == ""
    assert attempts == [None, [[2.0], [2.0]]]


@pytest.mark.catalogue(4)
def test_control_with_one_store_for_all_attempts_new_ranks_find_the_addresses_of_dead_ones(tmp_path, attempts_end, monkeypatch):
    """As torch's own agent has it (pytorch#135712)."""
    monkeypatch.setitem(globals(), "LATE_SECONDS", 60.0)
    fails(test_after_a_kill_ranks_meet_in_a_store_of_their_own, attempts_end, one_for_all=tmp_path, told="rank")


# --- what is named -----------------------------------------------------------------------------------------------------------


class Failure:
    """A rank that ended, as torch's agent tells it."""

    def __init__(self, exitcode: int, timestamp: int = 5):
        self.exitcode, self.timestamp = exitcode, timestamp

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


def ending(folder: Path, failures: dict[int, Failure], causes: dict[int, tuple[str, bool]]) -> Ending:
    """`causes`: what ranks said before they left, and whether it was that they had lost another."""
    for rank, (text, lost) in causes.items():
        (folder / f"{rank}.cause").write_text(json.dumps({"rank": rank, "lost_contact": lost, "text": text}))
    return local._failed(SimpleNamespace(failures=failures), folder / "failure.json", folder)


MISSED = ("LostRankError: rank 0 waited for rank 1 in a sum", True)
ENDS = {
    "killed": ({0: 1, 1: -9}, {}, "rank 1 was ended by SIGKILL"),
    "segmentation fault": ({0: 1, 1: -11}, {0: MISSED}, "rank 1 was ended by SIGSEGV; rank 0 waited for rank 1 in a sum"),
    "abort": ({0: 1, 1: -6}, {0: MISSED}, "rank 1 was ended by SIGABRT; rank 0 waited for rank 1 in a sum"),
    "left with 0": ({0: 1}, {0: MISSED}, f"rank 0 failed with exit code 1: {MISSED[0]}"),
    "exception": ({0: 1, 1: 1}, {0: MISSED, 1: ("ValueError: no", False)}, "rank 1 failed: ValueError: no"),
}
"""Exit codes by rank, what ranks said, and what the launcher says. It looks at rank 0 first."""


@pytest.mark.catalogue(6, 7)
@pytest.mark.parametrize("codes, causes, reason", ENDS.values(), ids=ENDS)
def test_what_ended_the_first_rank_is_named_for_what_it_is_and_tried_again(tmp_path, codes, causes, reason):
    found = ending(tmp_path, {rank: Failure(code, timestamp=4 + rank) for rank, code in codes.items()}, causes)
    assert found.reason == reason
    assert not found.explained and not found.stopped


def test_what_a_rank_said_of_its_own_mistake_is_the_cause_that_is_kept(tmp_path):
    told = {"rank": 1, "exit_code": 1, "message": "step 3 (rank 1): loss is not finite\nand more"}
    (tmp_path / "failure.json").write_text(json.dumps(told))
    found = ending(tmp_path, {1: Failure(1)}, {})
    assert found.explained and found.reason == "rank 1 failed: step 3 (rank 1): loss is not finite"


def test_of_a_rank_that_a_signal_ended_it_is_told_where_it_was(tmp_path):
    heart = HeartbeatWriter(tmp_path, 1, hang_seconds=1)
    heart.beat("backward")
    told = ending(tmp_path, {0: Failure(1), 1: Failure(-9)}, {0: MISSED}).reason
    assert told == "rank 1 was ended by SIGKILL (its last sign of life: backward); rank 0 waited for rank 1 in a sum"


# --- without a launcher ------------------------------------------------------------------------------------------------------

FORK: Any = multiprocessing.get_context("fork")


def rank_of(folder: Path) -> Any:
    process = FORK.Process(target=lambda: [end_with_launcher(folder), signal.pause()])
    process.start()
    return process


def launcher_of(folder: Path, begin: Callable[[], object]) -> Any:
    """A process that holds the lock of `folder`, and then does `begin`."""
    receiving, sending = FORK.Pipe(duplex=False)

    def launch() -> None:
        with launcher_here(folder):
            begun = begin()
            sending.send(getattr(begun, "pid", None))
            signal.pause()

    process = FORK.Process(target=launch)
    process.start()
    return process, receiving.recv()


def beside(folder: Path) -> tuple[Any, int]:
    """A launcher and a rank that something else has forked."""
    launcher, _ = launcher_of(folder, lambda: None)
    return launcher, rank_of(folder).pid


def below(folder: Path) -> tuple[Any, int]:
    """The bug: the launcher forks its rank itself, which inherits the lock."""
    return launcher_of(folder, lambda: rank_of(folder))


@pytest.mark.catalogue(16)
def test_a_rank_ends_once_the_lock_of_its_launcher_is_free(tmp_path, start=beside, seconds=200.0):
    launcher, pid = start(tmp_path)
    rank = psutil.Process(pid)
    try:
        launcher.kill()
        launcher.join()
        _, alive = psutil.wait_procs([rank], timeout=seconds)
        assert alive == []
    finally:
        if rank.is_running():
            rank.kill()


@pytest.mark.catalogue(16)
def test_control_a_rank_that_holds_the_lock_of_its_launcher_outlives_it(tmp_path):
    fails(test_a_rank_ends_once_the_lock_of_its_launcher_is_free, tmp_path, start=below, seconds=2.5)


def test_a_rank_that_does_not_stop_in_order_is_ended_ten_seconds_after_its_launcher(tmp_path, monkeypatch):
    assert orphans.LOOK_SECONDS + orphans.GRACE_SECONDS < 10
    monkeypatch.setattr(orphans, "GRACE_SECONDS", 0.1)

    def deaf() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_with_launcher(tmp_path)  # of which there is none
        while True:
            signal.pause()

    process = FORK.Process(target=deaf)
    process.start()
    process.join(200)
    assert process.exitcode == 1


RANK = """
import os, time
from ultrascale.launch import orphans
orphans.end_with_starter()
print(flush=True)
time.sleep(1000)
"""


def fork_one(told: Any) -> None:
    """Which says its number once it watches: its starter may be killed from then on."""

    def rank() -> None:
        os.environ["RANK"] = "0"
        end_with_starter()
        told.send(os.getpid())
        signal.pause()

    FORK.Process(target=rank).start()


def start_below_a_shell(told: Any) -> None:
    """As `torchrun --no-python script.sh` does: the shell has the environment of its rank."""
    shell = start_one(["sh", "-c", '"$0" -c "$1"; :', sys.executable, RANK])
    told.send(psutil.Process(shell.pid).children()[0].pid)


def start_to_outlive_us(told: Any) -> None:
    """In a session of its own, as `setsid` makes one."""
    told.send(start_one([sys.executable, "-c", RANK], start_new_session=True).pid)


def start_one(command: list[str], **how: Any) -> subprocess.Popen[Any]:
    """Start it with the environment of a rank, and wait until it watches."""
    process = subprocess.Popen(command, env=os.environ | {"RANK": "0"}, stdout=subprocess.PIPE, **how)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def outlives(start: Callable[[Any], None], seconds: float) -> bool:
    """Whether a rank that `start` starts is there so long after the process that did is killed."""
    receiving, sending = FORK.Pipe(duplex=False)
    starter = FORK.Process(target=lambda: [start(sending), signal.pause()])
    starter.start()
    rank = psutil.Process(receiving.recv())
    try:
        starter.kill()
        starter.join()
        _, alive = psutil.wait_procs([rank], timeout=seconds)
        return alive != []
    finally:
        if rank.is_running():
            rank.kill()


@pytest.mark.catalogue(16)
@pytest.mark.parametrize("start", [fork_one, start_below_a_shell])
def test_a_rank_ends_once_whatever_started_it_has_also_below_a_shell(start):
    assert not outlives(start, 200.0)


@pytest.mark.parametrize("nodes, in_order", [("1", True), ("2", False)])
def test_a_rank_ends_without_a_stop_in_order_where_torchrun_has_agents_elsewhere(tmp_path, nodes, in_order):
    """Which would take that for the end of the run, and not wait for this node."""

    def stop(number: int, frame: object) -> None:
        (tmp_path / "stopped").touch()
        os._exit(0)

    def rank(told: Any) -> None:
        os.environ.update(RANK="0", TORCHELASTIC_RUN_ID="1", GROUP_WORLD_SIZE=nodes)
        signal.signal(signal.SIGTERM, stop)
        end_with_starter()
        told.send(os.getpid())
        signal.pause()

    def start(told: Any) -> None:
        FORK.Process(target=rank, args=(told,)).start()

    assert not outlives(start, 200.0)
    assert (tmp_path / "stopped").exists() == in_order


def test_a_rank_that_is_meant_to_outlive_its_starter_does():
    assert outlives(start_to_outlive_us, 3 * orphans.LOOK_SECONDS)


@pytest.mark.catalogue(16)
def test_control_a_rank_that_watches_the_shell_above_it_outlives_its_starter(monkeypatch):
    watching = RANK.replace("orphans.end", "orphans._starter = os.getppid; orphans.end")
    monkeypatch.setitem(globals(), "RANK", watching)
    assert outlives(start_below_a_shell, 3 * orphans.LOOK_SECONDS)


def wait_for_ever(rendezvous: str, told: Any) -> None:
    told.send(os.getpid())
    signal.pause()


@pytest.mark.catalogue(16)
def test_forked_ranks_end_with_the_process_that_forked_them():
    receiving, sending = FORK.Pipe(duplex=False)
    parent = FORK.Process(target=run_forked, args=(2, wait_for_ever, sending))
    parent.start()
    ranks = [psutil.Process(receiving.recv()) for _ in range(2)]
    parent.kill()
    parent.join()
    _, alive = psutil.wait_procs(ranks, timeout=200)
    for rank in alive:
        rank.kill()
    assert alive == []
