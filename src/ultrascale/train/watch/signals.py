"""SIGTERM, Ctrl-C, SIGHUP and SIGUSR1: finish the step, save, leave.

A handler only takes a note. Python runs handlers between bytecodes, so one that arrives inside a collective waits for it; all
ranks then learn of the note when they next count tokens together, and stop before the same step. A second signal some seconds
later is the usual one and ends the process at once; not sooner, because a terminal and torchrun both deliver a Ctrl-C. That
holds until the process has left: one that comes between the save and the end is not taken for a crash.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ultrascale.launch.stopping import SAME_WISH_SECONDS, handled_by


@contextmanager
def on_stop_signal(take_note: Callable[[], None]) -> Iterator[None]:
    """While inside, the first stop signal that is not ignored calls `take_note` instead of ending the process. If one came, the
    same wish is passed over afterwards as well."""
    noted: list[float] = []

    def handler(number: int, frame: object) -> None:
        if noted and not is_the_same():
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif not noted:
            noted.append(time.monotonic())
            take_note()

    def is_the_same() -> bool:
        return bool(noted) and time.monotonic() - noted[0] <= SAME_WISH_SECONDS

    with handled_by(handler, and_after=is_the_same) as before:
        yield
