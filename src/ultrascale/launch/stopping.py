"""Signals to a launcher: the first one asks its ranks to save and leave.

Whoever is in a hurry sends a second one. A terminal, a batch system and torchrun may each deliver the same wish twice, so that
one within seconds is the same, and only a later one ends the ranks without a save.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal is gone. SIGUSR1: what Slurm is mostly asked to send some time before the end of a job."""
SAME_WISH_SECONDS = 3.0


def is_ignored(number: signal.Signals) -> bool:
    """Whether whoever started this process wants it to outlive this signal, as `nohup` does of SIGHUP. (A shell ignores SIGINT
    for what runs in its background, where one comes only on purpose.)"""
    return number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def stop_signals_raise() -> Iterator[None]:
    """While inside, a stop signal raises torch's SignalException, which its agent passes on to the ranks; once in some seconds.

    Only a main thread may handle signals; elsewhere this does nothing.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[float] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if not raised or time.monotonic() - raised[-1] > SAME_WISH_SECONDS:
            raised.append(time.monotonic())
            name = signal.Signals(number)
            raise SignalException(name.name, sigval=name)

    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS if not is_ignored(number)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
