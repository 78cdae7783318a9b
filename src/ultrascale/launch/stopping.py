"""Signals to a launcher: the first one asks its ranks to save and leave.

Whoever is in a hurry sends a second one. A terminal, a batch system and torchrun may each deliver the same wish twice, so that
one within seconds is the same, and only a later one ends the ranks without a save.
"""

from __future__ import annotations

import atexit
import os
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
SAME_REQUEST_SECONDS = 10.0
"""Counted from handler to handler: where a machine is busy, or a rank writes to its disk, one runs seconds after its signal."""
STARTING, PUT_OFF_SECONDS = "_start_workers", 0.1
"""Name of the function in which torch's agents start ranks, and the delay after which a signal that comes meanwhile is sent
again."""


def is_ignored(number: signal.Signals) -> bool:
    """True if whoever started this process wants it to outlive this signal, as `nohup` does of SIGHUP. (A shell ignores SIGINT
    for what runs in its background, where one comes only on purpose.)"""
    return number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], *, and_after: Callable[[], bool] = lambda: False
) -> Iterator[dict[int, Any]]:
    """While inside, stop signals that are not ignored are `handler`'s. Gives what handled each before, and will again, unless
    `and_after` says at the end that `handler` is to stay. If it still says so when Python ends, which forgets handlers long
    before the process is gone, the signals are ignored from there."""
    before: dict[int, Any] = {number: signal.signal(number, handler) for number in STOP_SIGNALS if not is_ignored(number)}
    try:
        yield before
    finally:
        if and_after():
            atexit.register(_ignore_if, and_after, handler)
        else:
            for number, previous in before.items():
                signal.signal(number, previous)


def _ignore_if(holds: Callable[[], bool], handler: Callable[[int, FrameType | None], None]) -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is handler and holds():
            signal.signal(number, signal.SIG_IGN)


def _is_starting_ranks(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != STARTING:
        frame = frame.f_back
    return frame is not None


@dataclass
class StopRequests:
    """Requests to stop that came while there were no ranks to ask."""

    first: signal.Signals | None = None
    are_kept: bool = False
    """True once requests are kept. Until then a signal keeps its earlier effect: nothing has been trained that could be
    lost."""
    heard_at: float | None = None
    """Time at which the ranks were last asked, or the first request was kept, by `time.monotonic`."""
    passed_on: signal.Signals | None = None
    """Signal that was last passed on to the ranks."""

    @property
    def heard_just_now(self) -> bool:
        """True if another signal counts as the same request."""
        return self.heard_at is not None and time.monotonic() - self.heard_at <= SAME_REQUEST_SECONDS


@contextmanager
def stop_signals_kept() -> Iterator[StopRequests]:
    """While inside, and not inside `stop_signals_raise`, a stop signal is kept for who asks. Only in a main thread.

    Afterwards the wish that ended it all may still come again, while the process tells how it went: that is passed over.
    """
    stop_requests = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requests
        return

    is_over = False

    def handler(number: int, frame: FrameType | None) -> None:
        if not stop_requests.heard_just_now and (is_over or not stop_requests.are_kept):
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif stop_requests.first is None and not is_over:
            stop_requests.first, stop_requests.heard_at = signal.Signals(number), time.monotonic()

    with handled_by(handler, and_after=lambda: stop_requests.heard_just_now) as before:
        try:
            yield stop_requests
        finally:
            is_over = True


@contextmanager
def stop_signals_raise(stop_requests: StopRequests) -> Iterator[None]:
    """While inside, a stop signal raises torch's SignalException, which its agent passes on to the ranks; once in some seconds.
    At once, if one has been kept before. While ranks are being started a signal is put off, for tenths of a second: the agent
    would not know of those that it has.

    Only a main thread may handle signals; elsewhere this does nothing.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if _is_starting_ranks(frame):
            threading.Timer(PUT_OFF_SECONDS, os.kill, (os.getpid(), number)).start()
        elif not stop_requests.heard_just_now:
            stop_requests.heard_at, stop_requests.passed_on = time.monotonic(), signal.Signals(number)
            name = signal.Signals(number)
            raise SignalException(name.name, sigval=name)

    with handled_by(handler):
        if stop_requests.first is not None:
            raise SignalException(stop_requests.first.name, sigval=stop_requests.first)
        yield
