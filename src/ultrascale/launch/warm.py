"""Ranks that start warm: forked by a process that has imported everything already and does nothing else.

Importing torch and the trainer takes a rank four seconds of processor time, at every restart. A fork server does it once, and
a rank then starts in tenths of a second. It has no threads and has not touched a device. Where there is CUDA ranks start cold
all the same: a driver that something imported has woken does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from importlib import import_module
from multiprocessing import resource_tracker, synchronize

LEAVING_SECONDS = 0.5
FORK_SERVER = "ultrascale.launch.fork_server"


def prepare(worker: str, *, warm: bool) -> None:
    """Let the fork server, which starts with the first rank, import `worker`."""
    _start_tracker()
    if warm:
        multiprocessing.set_forkserver_preload([FORK_SERVER, worker, "torch._dynamo", "torch.distributed.fsdp"])


def _start_tracker() -> None:
    """Python's process that counts semaphores: started so that it outlives what is sent to a whole group of processes (SIGINT
    and SIGTERM it ignores by itself)."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        resource_tracker.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def entry(worker: str, arguments: tuple[str, ...], environment: dict[str, str], *, warm: bool) -> tuple:
    """What torchrun's agent is to start, and with what arguments. `environment` is set in each rank as well."""
    if warm:
        return run_worker, (worker, arguments, tuple(environment.items()))
    os.environ |= environment
    return sys.executable, ("-m", worker, *arguments)


def run_worker(worker: str, arguments: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> None:
    """`python -m worker arguments...`, in this process."""
    import_module(FORK_SERVER).as_before()
    os.environ.update(environment)
    sys.argv = [worker, *arguments]
    try:
        code = import_module(worker).main()
    except Exception:
        traceback.print_exc()  # torch would put it into a file
        code = 1
    if code:
        sys.exit(code)
    leave_soon()


def leave_soon() -> None:
    """Let this process, once it has returned, wait for half a second and no longer until the agent has read what."""
    setattr(synchronize.Event, "wait", _wait_a_little)  # noqa: B010


def _wait_a_little(read: synchronize.Event, timeout: float | None = None) -> bool:
    """torch has a rank wait until the agent has read what it returns, and an agent that was asked to stop never does.

    This asks again and again: whoever sets an event waits for all that sleep in it, for ever if one of them has died.
    """
    end = time.monotonic() + LEAVING_SECONDS
    while not read.is_set():
        if time.monotonic() > end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        time.sleep(0.01)
    return True
