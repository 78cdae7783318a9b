"""A line on a terminal's stderr that says what a command is at, once that takes longer than a second, and goes when it ends.

A timer's signal draws it, no thread: commands fork, and a fork copies none. While a library computes for seconds without
returning to Python the line stands still.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

AFTER_SECONDS = 1.0
Words = str | Callable[[], str]
"""Text, or what makes it anew each time."""


@contextmanager
def waiting(what: str) -> Iterator[Callable[[Words], None]]:
    """While inside, after a second, print `what` and the seconds it takes; what is yielded changes the words."""
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer") and sys.stderr.isatty()
    if not usable:
        yield lambda words: None
        return
    words: Words = what
    started, shown = time.monotonic(), False

    def draw(*_: object) -> None:
        nonlocal shown
        if (taken := time.monotonic() - started) >= AFTER_SECONDS:
            shown = True
            text = words if isinstance(words, str) else words()
            print(f"\rultrascale: {text}, {taken:.0f} s\033[K", end="", file=sys.stderr, flush=True)

    def tell(now: Words) -> None:
        nonlocal words
        words = now
        draw()

    before = signal.signal(signal.SIGALRM, draw)
    signal.setitimer(signal.ITIMER_REAL, AFTER_SECONDS, AFTER_SECONDS)
    try:
        yield tell
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
