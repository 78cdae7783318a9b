"""Output of verbs: tables for people, JSON, and a line with the current phase of a command.

On a terminal, tables have its width; in a file or a pipe, lines are as long as needed. A phase that takes longer than a second
is printed on a terminal's stderr until it ends (`waiting`). A timer signal draws that line rather than a thread, because
commands fork, and a fork does not copy threads. While a library computes for seconds without returning to Python, the line does
not move.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import dumps
from typing import TYPE_CHECKING, Any

from ultrascale.api.stamp import stamped
from ultrascale.console import Trimmed

if TYPE_CHECKING:
    from rich.console import Console

PAGE_WIDTH = 80
CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")
FILE_WIDTH = 200
"""Columns of a file or a pipe: wider than any table, but a limit for paragraphs."""


def console_for_people() -> Console:
    """A console that colours only marked text, not numbers, and draws no emoji for `:smile:`. Output that is not a terminal is
    neither cut to 80 columns (unless COLUMNS is set) nor padded with blanks at the ends of lines."""
    from rich.console import Console

    if sys.stdout is None or sys.stdout.isatty():
        return Console(highlight=False, emoji=False)
    file: Any = Trimmed()
    return Console(highlight=False, emoji=False, file=file, width=None if "COLUMNS" in os.environ else FILE_WIDTH)


def harmless(text: str) -> str:
    """Untrusted text for a terminal: line ends and tabs stay, other control characters and those that turn the direction of
    writing are escaped, such as `\\x1b`. A terminal would obey them."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_json(document: Any, name: str | None = None, *, indent: int | None = None) -> None:
    """Print one JSON object, stamped with the `name` of its schema unless it already has a stamp."""
    print(dumps(document if name is None else stamped(name, document), indent=indent))


def drawing_width(console: Console) -> int:
    """Columns of a drawing that is split into blocks: those of the terminal, of a page for a file, or COLUMNS."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else PAGE_WIDTH


@contextmanager
def ending_like_ctrl_c(*signals: signal.Signals) -> Iterator[None]:
    """Context manager in which these signals end this process, and what it has started, as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


AFTER_SECONDS = 1.0
Words = str | Callable[[], str]
"""Text, or a function that returns the current text."""


@contextmanager
def waiting(what: str) -> Iterator[Callable[[Words], None]]:
    """Context manager that prints `what` and the elapsed seconds after one second; the yielded function changes the text."""
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer") and sys.stderr.isatty()
    if not usable:
        yield lambda words: None
        return
    words: Words = what
    started, shown = time.monotonic(), False

    def draw(*_: object) -> None:
        nonlocal shown
        if (elapsed := time.monotonic() - started) >= AFTER_SECONDS:
            shown = True
            text = words if isinstance(words, str) else words()
            print(f"\rultrascale: {text}, {elapsed:.0f} s\033[K", end="", file=sys.stderr, flush=True)

    def set_words(now: Words) -> None:
        nonlocal words
        words = now
        draw()

    before = signal.signal(signal.SIGALRM, draw)
    signal.setitimer(signal.ITIMER_REAL, AFTER_SECONDS, AFTER_SECONDS)
    try:
        yield set_words
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
