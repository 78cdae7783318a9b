"""Ranks that do not outlive the process that started them.

If the launcher is killed outright, nobody is left to end its ranks: they would train on, and meet the same command started
again. Each rank therefore looks every second whether its parent is still there. (Linux can send a signal at that moment,
`PR_SET_PDEATHSIG`; looking works everywhere.)
"""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK_SECONDS = 1.0
GRACE_SECONDS = 6.0
"""Time to stop in order, saving included. What a save leaves unfinished is swept away at the next start."""


def end_with_parent(parent: int) -> None:
    """From now on, stop as at SIGTERM once the process `parent` is no longer this one's parent, and soon after at any price."""
    threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
