"""Signals to a launcher: the first one asks its ranks to save and leave.

Whoever is in a hurry sends a second one. A terminal, a batch system and torchrun may each deliver the same wish twice, so that
one within seconds is the same, and only a later one ends the ranks without a save.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP: the terminal is gone. SIGUSR1: what Slurm is mostly asked to send some time before the end of a job."""
SAME_WISH_SECONDS = 3.0


def is_ignored(number: signal.Signals) -> bool:
    """Whether whoever started this process wants it to outlive this signal, as `nohup` does of SIGHUP. (A shell ignores SIGINT
    for what runs in its background, where one comes only on purpose.)"""
    return number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[dict[int, Any]]:
    """While inside, stop signals that are not ignored are `handler`'s. Gives what handled each before, and will again."""
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in STOP_SIGNALS if not is_ignored(number)}
    try:
        yield before
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@dataclass
class Wishes:
    """To stop, that came while no ranks were there to be asked."""

    first: signal.Signals | None = None
    are_kept: bool = False
    """Until then a signal does what it did before: nothing has been trained that could be lost."""


@contextmanager
def stop_signals_kept() -> Iterator[Wishes]:
    """While inside, and not inside `stop_signals_raise`, a stop signal is kept for who asks. Only in a main thread."""
    wishes = Wishes()
    if threading.current_thread() is not threading.main_thread():
        yield wishes
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if not wishes.are_kept:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif wishes.first is None:
            wishes.first = signal.Signals(number)

    with handled_by(handler) as before:
        yield wishes


@contextmanager
def stop_signals_raise(wishes: Wishes) -> Iterator[None]:
    """While inside, a stop signal raises torch's SignalException, which its agent passes on to the ranks; once in some seconds.
    At once, if one has been kept before.

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

    with handled_by(handler):
        if wishes.first is not None:
            raise SignalException(wishes.first.name, sigval=wishes.first)
        yield
