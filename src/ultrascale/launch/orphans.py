"""Ranks end when their launcher does.

If a launcher is killed with SIGKILL, its ranks would train on, and collide with a restart of the same command. So each rank has
a thread that waits for the end of its launcher, requests a stop as SIGTERM does, and soon after ends the process:

ours          holds a lock on a file while it lives, which the system releases however it ends. (The parent of a rank is no
              indicator: it is the fork server, which outlives the launcher while it has children.)
another's     torchrun, srun, mpirun, a script: the nearest ancestor whose environment does not name this rank, which skips
              shells in between.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ultrascale import console

LOCK_FILE, RANKS_FILE = "launcher.lock", "ranks.lock"
LOOK_SECONDS = 1.0
"""Polling interval in seconds for a process that is not a child, so that the system offers no way to wait for its end."""
GRACE_SECONDS = 6.0
"""Time to stop in order, saving included. The next start removes an unfinished save."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_held: list[IO[str]] = []
"""Locked until this process ends."""


@contextmanager
def launcher_here(folder: Path) -> Iterator[None]:
    """Context in which this process is the launcher of the ranks that use `folder`. At the end none of them is left: ranks that
    their parent no longer tracks stop by themselves, and are waited for."""
    try:
        with open(folder / LOCK_FILE, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    finally:
        until = time.monotonic() + GRACE_SECONDS + 1
        with open(folder / RANKS_FILE, "w") as file:
            while not _has_lock(file) and time.monotonic() < until:
                time.sleep(0.05)


def end_with_launcher(folder: Path) -> None:
    """Stops this process, first as at SIGTERM and soon after unconditionally, once the launcher of `folder` is gone."""
    with suppress(OSError):  # the launcher has removed its folder
        _held.append(open(folder / RANKS_FILE, "w"))  # noqa: SIM115  (as long as the process lives)
        fcntl.flock(_held[-1], fcntl.LOCK_SH)
    _watch(lambda: _wait_for_lock(folder / LOCK_FILE))


def end_with_starter() -> None:
    """Stops this rank in the same way if another program started it as one of several, according to its environment.

    A rank that torchrun has not started may outlive its parent on purpose: under `nohup`, or in its own session. If torchrun's
    agents run on other nodes, this node ends as if it had crashed, without an orderly stop, which the other agents would take
    for the end of the run: they restart their ranks and wait for this node.
    """
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or os.getsid(0) == os.getpid()
    if "RANK" not in os.environ or (is_detached and TORCHRUN not in os.environ):
        return
    pid = _starter()
    if pid > 1:  # in a container that has it as its first process, nothing outlives it
        _watch(lambda: _wait_for_process(pid), starter=pid, in_order=os.environ.get("GROUP_WORLD_SIZE", "1") == "1")


def terminate_with_parent() -> None:
    """Deliver SIGTERM to this process when the thread that started it has ended: for `preexec_fn`. On Linux alone."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _watch(wait: Callable[[], None], *, starter: int | None = None, in_order: bool = True) -> None:
    def watch() -> None:
        wait()
        if starter is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            console.print_line(f"ultrascale: process {starter}, which started this rank, has ended: stopping", "stderr")
        elif starter is not None and in_order:
            time.sleep(2 * LOOK_SECONDS)  # the rank that says why sees it too, and takes the others along
        if in_order:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _wait_for_lock(path: Path) -> None:
    with suppress(OSError), open(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _has_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _wait_for_process(pid: int) -> None:
    began = _stat(pid)[19:20]
    while os.getppid() == pid or (began and _stat(pid)[19:20] == began):
        time.sleep(LOOK_SECONDS)


def _starter() -> int:
    """The process that started this rank; at most 1 if it cannot be determined, or is gone."""
    variables = {f"{name}={os.environ[name]}".encode() for name in ("RANK", TORCHRUN) if name in os.environ}
    pid = os.getppid()
    with suppress(OSError, IndexError):  # another user's, or no /proc: it is the one that was looked at
        while pid > 1 and variables <= {*Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}:
            pid = int(_stat(pid)[1])
    return pid


def _stat(pid: int) -> list[str]:
    """Fields of a process in /proc: its state, its parent, and so on; empty if it has ended, or without /proc."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields if fields[0] not in ("Z", "X") else []
    return []
