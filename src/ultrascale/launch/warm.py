"""Warm ranks: forked by a process that has imported everything already and does nothing else.

Importing torch and the trainer takes a rank four seconds of CPU time at every restart. A fork server imports once, and a rank
then starts in tenths of a second. It has no threads and has not touched a device. With CUDA, ranks always start cold: a driver
that an import has initialized does not survive a fork.

    python -m ultrascale.launch.warm WORKER ARGUMENT...        one rank that starts cold

A terminal that is closed or a Ctrl-C in it signals all its processes, and so do services and batch systems. Ranks save and
exit; the fork server and Python's resource tracker must outlive them, and run with these signals blocked. In a new rank they
have their default effect until training handles them: it ends at once without a message, also while it imports.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, synchronize
from pathlib import Path

from ultrascale.garbage import collect_rarely
from ultrascale.launch.orphans import end_with_launcher
from ultrascale.launch.stopping import STOP_SIGNALS

LEAVING_SECONDS = 0.5
FOLDER_VARIABLE = "ULTRASCALE_SIGNS_OF_LIFE"
"""Environment variable with the folder that the launcher created for the attempt."""
LOST_EXIT_CODE = 255
"""Exit code that multiprocessing reports for a process whose fork server is gone."""
LOST_SECONDS = 5.0
"""Most seconds between the end of a process's pipes and of the process, on a busy machine."""


class LostForkServer(RuntimeError):
    """The process that the ranks are forked from has ended."""


def prepare(worker: str, *, warm: bool) -> None:
    """Start what ranks need; if `warm`, wait until the fork server has imported `worker`. Raises LostForkServer."""
    with _blocked():
        resource_tracker.ensure_running()
    if warm:
        modules = ["ultrascale.garbage.rarely", worker, "torch._dynamo", "torch.distributed.fsdp"]
        multiprocessing.set_forkserver_preload(modules)
        with _blocked():
            forkserver.ensure_running()
        first = multiprocessing.get_context("forkserver").Process(target=_nothing, daemon=True)
        with fork_server_watched():
            try:
                first.start()
                first.join()
            except KeyboardInterrupt:  # it would finish its imports before it noticed that we are gone
                os.kill(_fork_server(), signal.SIGKILL)
                raise


@contextmanager
def fork_server_watched() -> Iterator[None]:
    """Context that turns an error of the fork server's pipes into a LostForkServer if the server has ended."""
    try:
        yield
    except (EOFError, OSError):
        if not (how := fork_server_ending()):
            raise
        raise LostForkServer(how) from None


def fork_server_ending() -> str:
    """Description of how the fork server ended, perhaps a moment ago; empty if it lives or was never started."""
    if (pid := _fork_server()) == 0 or not hasattr(os, "waitid"):
        return ""
    until = time.monotonic() + LOST_SECONDS
    while (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:  # it is reaped at the next start
        if time.monotonic() > until:
            return ""
        time.sleep(0.02)
    killed = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    how = f"was ended by {signal.Signals(ended.si_status).name}" if killed else f"ended with exit code {ended.si_status}"
    hint = ", as the kernel does where memory runs out" if killed and ended.si_status == signal.SIGKILL else ""
    return f"the fork server, which the ranks come from, {how}{hint}"


def _fork_server() -> int:
    """Process id of the fork server, which multiprocessing keeps private; 0 if there is none."""
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None) or 0


def entry(worker: str, arguments: tuple[str, ...], folder: Path, *, warm: bool) -> tuple:
    """The function that torchrun's agent starts, and its arguments. `folder`: the attempt's."""
    if warm:
        return run_worker, (worker, arguments, str(folder))
    os.environ[FOLDER_VARIABLE] = str(folder)
    return sys.executable, ("-m", "ultrascale.launch.warm", worker, *arguments)


def run_worker(worker: str, arguments: tuple[str, ...], folder: str) -> None:
    """`python -m worker arguments...`, in this process."""
    os.environ[FOLDER_VARIABLE] = folder
    try:
        code = _run(worker, arguments)
    except Exception:
        traceback.print_exc()  # torch would put it into a file
        code = 1
    if code:
        sys.exit(code)
    leave_soon()


def _run(worker: str, arguments: tuple[str, ...]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_launcher(Path(os.environ[FOLDER_VARIABLE]))
    sys.argv = [worker, *arguments]
    collect_rarely()
    return import_module(worker).main()


def _nothing() -> None:
    pass


@contextmanager
def _blocked() -> Iterator[None]:
    """Context in which child processes of this thread start with the stop signals blocked; signals to this process wait until
    its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_soon() -> None:
    """Limit the time that this process, after its return, waits for the agent to read its result to half a second."""
    setattr(synchronize.Event, "wait", _wait_a_little)  # noqa: B010


def _wait_a_little(read: synchronize.Event, timeout: float | None = None) -> bool:
    """Wait in slices: torch has a rank wait until the agent has read its result, and an agent that is stopping never does.

    A process that sets an event waits for all that sleep on it, forever if one of them has died.
    """
    end = time.monotonic() + LEAVING_SECONDS
    while not read.is_set():
        if time.monotonic() > end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        time.sleep(0.01)
    return True


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1], tuple(sys.argv[2:])))
