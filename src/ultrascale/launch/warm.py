"""Ranks that start warm: forked by a process that has imported everything already and does nothing else.

Importing torch and the trainer takes a rank four seconds of processor time, at every restart. A fork server does it once, and
a rank then starts in tenths of a second. It has no threads and has not touched a device. Where there is CUDA ranks start cold
all the same: a driver that something imported has woken does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from importlib import import_module

LEAVING_SECONDS = 0.5


def prepare(worker: str, *, warm: bool) -> None:
    """Let the fork server, which starts with the first rank, import `worker`."""
    if warm:
        multiprocessing.set_forkserver_preload([worker, "torch._dynamo", "torch.distributed.fsdp"])


def entry(worker: str, arguments: tuple[str, ...], environment: dict[str, str], *, warm: bool) -> tuple:
    """What torchrun's agent is to start, and with what arguments. `environment` is set in each rank as well."""
    if warm:
        return run_worker, (worker, arguments, tuple(environment.items()))
    os.environ |= environment
    return sys.executable, ("-m", worker, *arguments)


def run_worker(worker: str, arguments: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> None:
    """`python -m worker arguments...`, in this process."""
    os.environ.update(environment)
    sys.argv = [worker, *arguments]
    try:
        code = import_module(worker).main()
    except Exception:
        traceback.print_exc()  # torch would put it into a file
        code = 1
    if code:
        sys.exit(code)
    threading.Thread(target=_leave, daemon=True).start()


def _leave() -> None:
    """torch has a rank wait until the agent has read what it returns, and an agent that was asked to stop never does."""
    time.sleep(LEAVING_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
