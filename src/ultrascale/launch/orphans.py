"""Ranks that do not outlive their launcher.

If the launcher is killed outright, nobody is left to end its ranks: they would train on, and meet the same command started
again. The launcher therefore holds a lock on a file for as long as it lives, which the system lets go of however it ends, and
each rank looks every second whether it could have it. (Its parent tells nothing: that is the fork server, which outlives the
launcher while it has children. A process number may be somebody else's by now.)
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "launcher.lock"
LOOK_SECONDS = 1.0
GRACE_SECONDS = 6.0
"""Time to stop in order, saving included. What a save leaves unfinished is swept away at the next start."""


@contextmanager
def launcher_here(folder: Path) -> Iterator[None]:
    """While inside, this process is the launcher of the ranks that were given `folder`."""
    with open(folder / LOCK_FILE, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def end_with_launcher(folder: Path) -> None:
    """From now on, stop as at SIGTERM once nobody is the launcher of `folder` any more, and soon after at any price."""
    threading.Thread(target=_watch, args=(folder / LOCK_FILE,), daemon=True, name="launcher-watch").start()


def _watch(path: Path) -> None:
    while _is_held(path):
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def _is_held(path: Path) -> bool:
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # the launcher has taken its folder away
        return False
