"""The console of a run, which may go before the run does: a full disk under a redirection, a pipe that nobody reads any more, a
terminal that was closed, a stream closed from the start.

None of them is a reason to end weeks of training. The first line that cannot be written is the last one tried: the stream's
number then leads to the null device, so that whatever else prints there, the flush at the end of the process included, meets no
error either.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Literal

Stream = Literal["stdout", "stderr"]
NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}


def print_line(text: str, stream: Stream = "stdout") -> str:
    """Print one line; empty, or why that failed. After a failure the stream is gone: later lines go nowhere, without one.

    Raises UnicodeEncodeError where the locale has no bytes for the text.
    """
    file = getattr(sys, stream)
    if file is None:
        redirect_to_null(stream)
        return "it was closed from the start"
    try:
        print(text, file=file, flush=True)
    except UnicodeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: closed in this process
        redirect_to_null(stream)
        return error_text(error)
    return ""


def finish_stdout() -> str:
    """Write out what is still to be printed at the end of a process; empty, or why that failed."""
    if sys.stdout is None:
        return ""
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        redirect_to_null("stdout")
        return error_text(error)
    return ""


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """While inside, what this process and those it starts print goes to stderr: stdout is for what a program will read."""
    finish_stdout()
    saved_stdout = os.dup(NUMBERS["stdout"])
    os.dup2(NUMBERS["stderr"], NUMBERS["stdout"])
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved_stdout, NUMBERS["stdout"])
        os.close(saved_stdout)


def redirect_to_null(stream: Stream) -> None:
    """Lead the stream to the null device."""
    file, number = getattr(sys, stream), NUMBERS[stream]
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):
        if file.fileno() == number:  # what the stream still holds goes there too
            os.dup2(null, number)
    setattr(sys, stream, open(null, "w"))  # noqa: SIM115 (as long as the process)


def reserve_closed_streams() -> None:
    """Keep the number of each standard stream that is closed from the first file that is opened: what some library prints would
    land in a checkpoint. It is held for reading, so that writing goes on failing, in processes started from this one too."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            placeholder = os.open(os.devnull, os.O_RDONLY)
            os.set_inheritable(placeholder, True)
            assert placeholder == number, "the lowest number that is free"


def error_text(error: Exception) -> str:
    """The system's own words, without its number."""
    return getattr(error, "strerror", None) or str(error)


class Trimmed:
    """Standard output, or the other stream, whatever it is at the time, without blanks at the ends of lines."""

    def __init__(self, stream: Stream = "stdout"):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write what is left of the text, and say that all of it was."""
        lines = text.split("\n")
        getattr(sys, self.stream).write("\n".join([*(line.rstrip(" ") for line in lines[:-1]), lines[-1]]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self.stream), name)
