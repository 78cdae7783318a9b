"""When the watchdog takes a rank's stack for whole, and whom it keeps still meanwhile."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from ultrascale.heartbeat import Heartbeat
from ultrascale.launch import watchdog

RANK = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "w"), all_threads=True)
print(flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def rank(tmp_path) -> Iterator[Heartbeat]:
    """A process that writes its stack when it is asked to."""
    words = [sys.executable, "-c", RANK, str(tmp_path / "0.stack")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    try:
        yield Heartbeat(0, process.pid, 1, 0.0, 1, 0, "forward", False, 1.0, ())
    finally:
        process.kill()
        process.communicate()


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def is_stopped(beat: Heartbeat) -> bool:
    return psutil.Process(beat.pid).status() == psutil.STATUS_STOPPED


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_stack_is_whole_once_the_signal_for_it_is_neither_pending_nor_being_handled(tmp_path, rank):
    before = watchdog._writing_stacks(rank.pid)
    assert before == set()
    os.kill(rank.pid, signal.SIGSTOP)
    until(lambda: is_stopped(rank))
    os.kill(rank.pid, watchdog.STACK_SIGNAL)
    (tmp_path / "0.stack").write_text("Current thread")  # as much as is written so far
    assert not watchdog._has_written(tmp_path, rank, before)
    os.kill(rank.pid, signal.SIGCONT)
    until(lambda: watchdog._has_written(tmp_path, rank, before))
    # Stopped in its last lines, perhaps before it reached the very last.
    assert re.search(r'"<string>", line [456] in <module>\n', (tmp_path / "0.stack").read_text())


def test_a_stopped_rank_that_is_woken_for_its_stack_is_stopped_again(tmp_path, rank):
    os.kill(rank.pid, signal.SIGSTOP)
    until(lambda: is_stopped(rank))
    os.kill(rank.pid, watchdog.STACK_SIGNAL)
    watchdog._wake_for_its_stack(tmp_path, rank, set())
    until(lambda: is_stopped(rank))
    assert (tmp_path / "0.stack").read_text()


def test_ranks_that_are_kept_still_go_on_afterwards(rank):
    with watchdog._stopped_processes([rank]):
        until(lambda: is_stopped(rank))
    until(lambda: not is_stopped(rank))
