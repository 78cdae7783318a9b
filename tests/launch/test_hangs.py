"""Ranks that stop, spin, or do not agree on their collectives, seen from a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted import fails
from stand_ins import Clock
from train.small_runs import BeforeStep, at_step, make_corpus, small_run, train_ranks

from ultrascale import heartbeat
from ultrascale.checkpoint import newest_valid
from ultrascale.description.layout import Layout
from ultrascale.description.run import Faults
from ultrascale.heartbeat import Heartbeat, ReachedCollective
from ultrascale.launch.forked import RankFailed
from ultrascale.launch.watchdog import STACK_SIGNAL, Hang, disagreement, innermost_line, judge, watch
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.trainer import Trainer
from ultrascale.train.watch.signs_of_life import FOLDER_VARIABLE

ZERO_3 = Layout(dp=2, zero_stage=3, micro_batch_size=2)
FIRST, SECOND = ReachedCollective("ranks 0 to 1 (2)", 4, "a sum"), ReachedCollective("ranks 0 to 1 (2)", 5, "the norm")


def beat(
    rank: int, *, waiting: bool = True, doing: str = "a sum", collectives: tuple[ReachedCollective, ...] = ()
) -> Heartbeat:
    return Heartbeat(rank, 1, 9, 0.0, 7, 0, doing, waiting, 3.0, collectives)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where ranks leave their signs of life; also a corpus for `small_run`."""
    make_corpus(tmp_path / "tokens")
    signs = tmp_path / "signs"
    signs.mkdir()
    (tmp_path / "small").mkdir()  # a launcher has made the run's folder before its ranks start
    monkeypatch.setenv(FOLDER_VARIABLE, str(signs))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "64")
    return tmp_path


def hang(
    folder: Path,
    before_step: BeforeStep,
    *,
    hang_seconds: float = 0.5,
    patience: float = 600.0,
    every_steps: int | None = None,
) -> Hang | None:
    """What the watchdog says of a run on two ranks in which something happens; None if it says nothing until the run ends.

    A rank counts as hanging when what happens says so (`count_from_now`), and not sooner, however slow this machine is."""
    found: list[Hang | None] = []
    over = threading.Event()
    looking = threading.Thread(target=lambda: found.append(watch(folder / "signs", lambda: not over.is_set())), daemon=True)
    looking.start()
    run = replace(small_run(folder, layout=ZERO_3), faults=Faults(hang_seconds=hang_seconds))
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=every_steps))

    def act(trainer: Trainer) -> None:
        if trainer.steps_done == 0:
            own_heart().patience = patience
        before_step(trainer)

    with suppress(RankFailed):
        train_ranks(run, before_step=act)
    over.set()
    looking.join()
    return found[0]


def own_heart() -> heartbeat.HeartbeatWriter:
    assert heartbeat._heart is not None
    return heartbeat._heart


def count_from_now() -> None:
    """From here on this rank is overdue after `hang_seconds`."""
    own_heart().patience = 0.0
    own_heart().beat("between steps")


def count_once_it_waits_in(what: str) -> None:
    """The same, but only from when this rank waits in `what`."""
    heart = own_heart()

    def beat(doing: str, *, waiting: bool = False, extra_seconds: float | None = None) -> None:
        if waiting and doing.startswith(what):
            heart.patience = 0.0
        heartbeat.HeartbeatWriter.beat(heart, doing, waiting=waiting, extra_seconds=extra_seconds)

    heart.beat = beat  # type: ignore[method-assign]


def until_the_other_waits(trainer: Trainer) -> int:
    """Until rank 0 waits in the sum that this step begins with; its process."""
    while True:
        for other in heartbeat.read(Path(os.environ[FOLDER_VARIABLE])):
            at_sum = other.waiting and other.doing == "a sum over all ranks" and other.steps_done == trainer.steps_done
            if other.rank == 0 and at_sum and other.collectives[-1].line.startswith("train/step.py:"):
                return other.pid
        time.sleep(0.01)


def stop_this_process(trainer: Trainer) -> None:
    """Here: of a signal to the process another thread may take notice, while this one goes on for a while."""
    until_the_other_waits(trainer)
    count_from_now()
    while True:  # also after it was woken for its stack
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def stop_again_and_again(trainer: Trainer) -> None:
    """Whenever it is woken it stops again, before the thread that the signal for a stack came to has written it."""
    until_the_other_waits(trainer)
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    count_from_now()
    while True:
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def hold_the_lock(trainer: Trainer) -> None:
    """As a C extension that never lets go of the interpreter: no thread of this process runs any more."""
    until_the_other_waits(trainer)
    count_from_now()
    library = ctypes.PyDLL(None)
    while True:
        library.usleep(ctypes.c_uint(60_000_000))


def skip_a_collective(trainer: Trainer) -> None:
    until_the_other_waits(trainer)
    count_once_it_waits_in("the gather of a bucket")
    object.__setattr__(trainer.ranks, "__class__", _Skips)


def leave_late(trainer: Trainer) -> None:
    """Hang for longer than a hang is, and leave by itself, so that the test ends; the other has waited all the while."""
    until_the_other_waits(trainer)
    count_from_now()
    time.sleep(3.0)
    until_the_other_waits(trainer)
    (Path(os.environ[FOLDER_VARIABLE]) / "waited").touch()
    os.kill(os.getpid(), signal.SIGKILL)


class _Skips(Ranks):
    """Keeps its token counts to itself, once."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        object.__setattr__(self, "__class__", Ranks)
        return values


@pytest.mark.catalogue(17)
@pytest.mark.parametrize("stop", [stop_this_process, stop_again_and_again])
def test_a_stopped_rank_is_named_with_the_collective_that_the_other_waits_in(folder, stop):
    found = hang(folder, at_step(3, stop, rank=1))
    assert found is not None
    assert found.culprits == (1,) and found.steps_done == 3
    why, told = found.reason.split(" debugger): ")
    own, other = told.split("; ")
    assert why == "no sign of life in step 3: rank 1 is stopped by a signal (SIGSTOP, or a"
    assert own.startswith("rank 1 was at between steps (train/loop.py:")
    assert other.startswith("rank 0 waited in a sum over all ranks (train/step.py:")
    trace = json.loads((folder / "signs" / "0.trace.json").read_text())
    assert any(entry["profiling_name"] == "gloo:all_reduce" for entry in trace["entries"])


@pytest.mark.catalogue(11)
def test_a_stop_while_a_collective_hangs_ends_and_leaves_the_checkpoint_before(folder, leave=stop_this_process):
    """The handler of the rank that waits does not run before its collective ends."""

    def ask_and_leave(trainer: Trainer) -> None:
        os.kill(until_the_other_waits(trainer), signal.SIGTERM)
        leave(trainer)

    found = hang(folder, at_step(3, ask_and_leave, rank=1), every_steps=2)
    assert newest_valid(folder / "small" / "checkpoints") == folder / "small" / "checkpoints" / "step-00000002"
    assert found is not None and found.culprits == (1,)


@pytest.mark.catalogue(11)
def test_control_without_a_watchdog_a_stop_waits_for_the_collective(folder, monkeypatch):
    monkeypatch.setitem(globals(), "watch", lambda folder, is_wanted: None)
    test = test_a_stop_while_a_collective_hangs_ends_and_leaves_the_checkpoint_before
    fails(test, folder, leave=leave_late, told="None is not None")
    assert (folder / "signs" / "waited").exists()


@pytest.mark.catalogue(19)
def test_a_rank_whose_interpreter_is_locked_is_named_although_none_of_its_threads_runs(folder):
    found = hang(folder, at_step(3, hold_the_lock, rank=1))
    assert found is not None
    assert found.culprits == (1,)
    assert "rank 1: was at between steps (train/loop.py:" in found.reason
    assert "did not come to where rank 0 waited in a sum over all ranks (train/step.py:" in found.reason


@pytest.mark.catalogue(18)
def test_a_rank_that_skips_a_collective_is_named_with_where_it_went_instead(folder):
    found = hang(folder, at_step(3, skip_a_collective, rank=1))
    assert found is not None
    assert found.culprits == (1,)
    assert "rank 1: waited in the gather of a bucket's parameters (parallel/data/collectives.py:" in found.reason
    assert "did not come to where rank 0 waited in a sum over all ranks (train/step.py:" in found.reason


@pytest.mark.catalogue(18)
def test_a_collective_of_another_shape_is_told_although_gloo_aborts_the_process(folder):
    def sum_too_much(trainer: Trainer) -> None:
        until_the_other_waits(trainer)
        count_once_it_waits_in("a sum over all ranks")
        trainer.ranks.sum(torch.zeros(3, dtype=torch.int64))

    hang(folder, at_step(3, sum_too_much, rank=1))
    found = disagreement(heartbeat.read(folder / "signs"))
    assert found is not None
    first, second = found[1].split(" differs: ")[1].split(", rank 1 came to ")
    assert first.startswith("rank 0 came to a sum over all ranks of int64[2] (train/step.py:")
    assert second.startswith("a sum over all ranks of int64[3] (train/loop.py:")


@pytest.mark.catalogue(17)
def test_control_without_patience_running_out_a_stopped_rank_is_named_by_nobody(folder):
    assert hang(folder, at_step(3, leave_late, rank=1), hang_seconds=600.0) is None
    assert (folder / "signs" / "waited").exists()


@pytest.mark.catalogue(17)
def test_control_a_rank_that_gets_on_without_signs_of_life_is_taken_for_hanging(folder):
    """They are what the watchdog goes by: a heart that stands still is seen although the rank computes."""

    def stop_the_heart(trainer: Trainer) -> None:
        until_the_other_waits(trainer)
        count_from_now()
        heartbeat._heart = None
        with open(folder / "signs" / "computed", "wb", buffering=0) as file:
            while True:
                file.write(bytes([int(torch.ones(8).sum())]))
                time.sleep(0.01)

    found = hang(folder, at_step(3, stop_the_heart, rank=1))
    assert found is not None and found.culprits == (1,)
    assert (folder / "signs" / "computed").stat().st_size > 10


@pytest.mark.catalogue(18)
def test_control_ranks_that_come_to_the_same_collectives_are_not_accused(folder):
    assert hang(folder, at_step(3, lambda trainer: None, rank=1), hang_seconds=60.0, patience=0.0) is None
    assert disagreement(heartbeat.read(folder / "signs")) is None


def test_of_several_ranks_the_minority_is_blamed_and_of_two_both():
    beats = [beat(rank, collectives=(FIRST, replace_what(SECOND, "a sum") if rank == 2 else SECOND)) for rank in range(4)]
    found = disagreement(beats)
    assert found is not None and found[0] == (2,)
    assert disagreement(beats[:2]) is None
    both = disagreement(beats[1:3])
    assert both is not None and both[0] == (1, 2) and both[1].startswith("collective 5 of ranks 0 to 1 (2) differs")


def replace_what(collective: ReachedCollective, what: str) -> ReachedCollective:
    return collective._replace(what=what)


def test_ranks_that_all_wait_and_agree_are_all_told():
    found = judge([beat(0), beat(1, doing="the norm")], [], {0: "a.py:1 in f"})
    assert found.culprits == (0, 1)
    assert found.reason == "no sign of life in step 7: rank 0 waited in a sum (a.py:1 in f); rank 1 waited in the norm"


def test_ranks_that_wait_for_other_nodes_are_told_with_the_group_they_wait_in():
    group = "ranks 0 to 3 (4)"
    came = (FIRST._replace(group=group),)
    found = judge([beat(0, collectives=came), beat(1, collectives=came)], [], {})
    assert found.culprits == (0, 1)
    assert ". Others of ranks 0 to 3 (4) are on other nodes: look at the network between" in found.reason
    assert "other nodes" not in judge([beat(0, collectives=(FIRST,)), beat(1, collectives=(FIRST,))], [], {}).reason


def test_the_line_told_is_the_caller_of_what_waits():
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 3 in _bootstrap_inner\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/t/distributed_c10d.py", line 9 in all_reduce\n'
        '  File "/s/ultrascale/parallel/mesh.py", line 54 in sum\n  File "/s/ultrascale/train/step.py", line 8 in agree\n'
    )
    assert innermost_line(stack) == "train/step.py:8 in agree"
    assert innermost_line("") == ""


def test_a_checkout_that_is_called_as_the_package_is_does_not_make_tests_its_lines():
    frames = ("tests/launch/test_hangs.py", "src/ultrascale/train/loop.py")
    stack = "".join(f'  File "/srv/ultrascale/{file}", line 8 in step\n' for file in frames)
    assert innermost_line(stack) == "train/loop.py:8 in step"


def test_of_a_rank_that_cannot_write_its_stack_the_last_collective_tells_the_line():
    came = (ReachedCollective("all", 3, "a sum of int64[2]", "train/step.py:8 in agree"),)
    found = judge([beat(0, waiting=False, doing="forward"), beat(1, collectives=came)], [0], {})
    assert found.reason.endswith(": rank 0 was at forward; rank 1 waited in a sum (train/step.py:8 in agree)")


HANG_AND_IGNORE = """
import signal, sys, time
from pathlib import Path
from ultrascale.heartbeat import HeartbeatWriter
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
heart = HeartbeatWriter(Path(sys.argv[1]), 0, hang_seconds=0.1)
heart.started_at, heart.steps_done = 0, 1
heart.beat("forward")
print(flush=True)
time.sleep(600)
"""


def test_the_watchdog_kills_the_culprit_also_where_it_can_write_nothing_and_nobody_reads_what_it_says(tmp_path):
    culprit = subprocess.Popen([sys.executable, "-c", HANG_AND_IGNORE, str(tmp_path)], stdout=subprocess.PIPE)
    assert culprit.stdout is not None and culprit.stdout.readline()
    (tmp_path / "hang.json").mkdir()  # what is written cannot take its place
    try:
        command = [sys.executable, "-m", "ultrascale.launch.watchdog", str(tmp_path), "--parent", str(os.getpid())]
        with open("/dev/full", "w") as full:
            assert subprocess.run(command, stderr=full, timeout=200).returncode == 0
        assert culprit.wait(60) == -signal.SIGKILL
    finally:
        culprit.kill()


def test_a_slow_part_of_a_step_is_no_hang_once_it_has_been_as_slow_before(tmp_path, clock_of):
    clock = clock_of(heartbeat)
    heart = heartbeat.HeartbeatWriter(tmp_path, 0, hang_seconds=5.0)
    assert overdue_after(tmp_path, clock, 600.0) < 0  # the start may load and compile
    heart.started_at = 0
    heart.steps_done = 1
    heart.beat("forward")
    assert overdue_after(tmp_path, clock, 4.0) < 0 < overdue_after(tmp_path, clock, 6.0)
    clock.now += 2.0
    heart.beat("backward")
    heart.beat("forward")
    assert overdue_after(tmp_path, clock, 19.0) < 0 < overdue_after(tmp_path, clock, 21.0)
    heart.beat("saving", extra_seconds=3600.0)
    assert overdue_after(tmp_path, clock, 3600.0) < 0


def overdue_after(folder: Path, clock: Clock, seconds: float) -> float:
    clock.now += seconds
    (found,) = heartbeat.read(folder)
    overdue = found.overdue
    clock.now -= seconds
    return overdue


def test_a_file_that_is_no_sign_of_life_is_passed_over(tmp_path):
    (tmp_path / "0.beat").write_bytes(b"short")
    (tmp_path / "1.beat").write_bytes(bytes(heartbeat.FILE_BYTES))
    assert heartbeat.read(tmp_path) == []


def test_only_the_last_collectives_are_kept_each_with_its_number(tmp_path):
    heart = heartbeat.HeartbeatWriter(tmp_path, 3, hang_seconds=5.0)
    write: Callable[[str, str], None] = heart.note_collective
    for number in range(heartbeat.RING + 5):
        write("all", f"sum {number}")
    heart.beat("x")
    (found,) = heartbeat.read(tmp_path)
    assert found.rank == 3 and len(found.collectives) == heartbeat.RING
    assert found.collectives[0][:3] == ("all", 5, "sum 5") and found.collectives[-1][:3] == ("all", 68, "sum 68")
