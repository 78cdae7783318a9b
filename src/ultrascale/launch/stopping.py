"""Signals to a launcher: the first one requests that its ranks save and exit.

A second signal ends the ranks without a save. A terminal, a batch system and torchrun may each deliver the same request twice,
so a second signal within seconds counts as the same request.
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
"""SIGHUP: the terminal is gone. SIGUSR1: the usual choice for Slurm's warning some time before the end of a job."""
SAME_REQUEST_SECONDS = 10.0
"""Counted from handler to handler: on a busy machine, or while a rank writes to disk, a handler runs seconds after its
signal."""
STARTING, PUT_OFF_SECONDS = "_start_workers", 0.1
"""Name of the function in which torch's agents start ranks, and the delay after which a signal that arrives meanwhile is sent
again.
"""


def is_ignored(number: signal.Signals) -> bool:
    """True if this process was started to survive this signal, as with `nohup` and SIGHUP. (A shell ignores SIGINT for
    background processes, which receive one only on purpose.)"""
    return number is not signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], *, and_after: Callable[[], bool] = lambda: False
) -> Iterator[dict[int, Any]]:
    """Context in which `handler` handles the stop signals that are not ignored. Yields the earlier handlers, which are restored
    at the end, unless `and_after` then returns True. If it still does when Python exits, which resets handlers long before the
    process ends, the signals are ignored from there."""
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
    """Stop requests that arrived while no ranks were running."""

    first: signal.Signals | None = None
    are_kept: bool = False
    """True once requests are kept. Before that a signal has its default effect: nothing has been trained yet."""
    heard_at: float | None = None
    """Time of the last request to the ranks, or of the first one kept, by `time.monotonic`."""
    passed_on: signal.Signals | None = None
    """Signal that was last forwarded to the ranks."""

    @property
    def heard_just_now(self) -> bool:
        """True if another signal counts as the same request."""
        return self.heard_at is not None and time.monotonic() - self.heard_at <= SAME_REQUEST_SECONDS


@contextmanager
def stop_signals_kept() -> Iterator[StopRequests]:
    """Context in which stop signals are kept for a later query, except inside `stop_signals_raise`. Main thread only.

    Afterwards repeats of the request that ended the run may still arrive while the process reports: they are ignored.
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
    """Context in which a stop signal raises torch's SignalException, which its agent forwards to the ranks; once in some
    seconds. A signal that was kept before raises at once. While ranks are being started a signal is delayed by tenths of a
    second, because the agent does not know its ranks yet.

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
