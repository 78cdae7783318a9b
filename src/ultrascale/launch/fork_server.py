"""What the fork server imports first, and nobody else: a signal to a whole group of processes must not end it.

A terminal that closes sends SIGHUP to all its processes, and a service or a batch system SIGTERM or SIGUSR1. Ranks save and
leave; if the server is gone by then, the launcher takes them for dead and leaves before they have saved. It ends by itself
once its launcher has.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

GROUP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_SERVER = os.getpid()


def _pass_over(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _SERVER:  # in a rank that has just been forked
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


_BEFORE = {n: signal.signal(n, _pass_over) for n in GROUP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}


def as_before() -> None:
    """In a rank: let these signals do what they did before."""
    for number, handler in _BEFORE.items():
        signal.signal(number, handler)
