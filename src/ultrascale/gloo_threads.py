"""gloo's threads, scheduled so that they do not preempt what computes (Linux).

An event loop spins on epoll while the thread that sends holds the lock of its connection (pytorch/gloo#246). If ranks outnumber
processors, another rank's event loop, woken by that very message, preempts the sender, whose own loop then spins for a whole
time slice. As batch work (sched(7)) a thread waits for the end of the slice instead, and still starts at once on a processor
that is free.

    python benchmarks/cpu/train_speed.py --only "4 eager fp32" "as it is fp32" --rounds 5 --steps 3
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def gloo_threads_as_batch() -> Iterator[None]:
    """Context for creating gloo's process groups: threads that start within run as batch work. Needs no privilege.

    A thread inherits its policy from the one that starts it, which has this one until the context ends.
    """
    changed = False
    try:
        with suppress(OSError, AttributeError):  # a container or a C library may forbid it
            if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                changed = True
        yield
    finally:
        if changed:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
