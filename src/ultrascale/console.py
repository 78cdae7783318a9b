"""The console of a run, which may disappear before the run ends: a full disk under a redirection, a pipe without a reader, a
closed terminal, a stream closed from the start.

None of these may end weeks of training. After the first line that cannot be written, the stream's file descriptor leads to the
null device, so that further output, including the flush at the end of the process, meets no error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.table import Table

Stream = Literal["stdout", "stderr"]
NUMBERS: dict[Stream, int] = {"stdout": 1, "stderr": 2}


def print_line(text: str, stream: Stream = "stdout") -> str:
    """Print one line; returns an empty text, or the reason of a failure. After a failure later lines are discarded without
    error.

    Raises UnicodeEncodeError if the locale cannot encode the text.
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
    """Flush the remaining output at the end of a process; returns an empty text, or the reason of a failure."""
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
    """Context manager that sends all output of this process and of those it starts to stderr: stdout is for programs."""
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
    """Redirect the stream to the null device."""
    file, number = getattr(sys, stream), NUMBERS[stream]
    null = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):
        if file.fileno() == number:  # the stream's buffer goes there too
            os.dup2(null, number)
    setattr(sys, stream, open(null, "w"))  # noqa: SIM115 (as long as the process)


def reserve_closed_streams() -> None:
    """Reserve the file descriptor of each closed standard stream, so that no later file gets it: output of a library would
    otherwise be written into a checkpoint. It is opened for reading, so that writing still fails, also in processes started
    from this one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            placeholder = os.open(os.devnull, os.O_RDONLY)
            os.set_inheritable(placeholder, True)
            assert placeholder == number, "the lowest number that is free"


def error_text(error: Exception) -> str:
    """The system's own message, without the error number."""
    return getattr(error, "strerror", None) or str(error)


class Trimmed:
    """Standard output, or the other stream, without blanks at the ends of lines."""

    def __init__(self, stream: Stream = "stdout"):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the trimmed text, and report all of it as written."""
        lines = text.split("\n")
        getattr(sys, self.stream).write("\n".join([*(line.rstrip(" ") for line in lines[:-1]), lines[-1]]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self.stream), name)


def plain_table(
    *columns: str, left: Collection[str] | None = None, whole: Collection[str] = (), folds: bool = False, **style: Any
) -> Table:
    """A table without a frame. `left`: columns aligned left, the others right (None: all left). `whole`: columns whose cells
    are never wrapped. `folds`: long words are folded, not cut. `style`: further arguments of rich's Table."""
    from rich.table import Table

    settings: dict[str, Any] = {"header_style": "bold", "pad_edge": False} | style
    table = Table(box=None, **settings)
    for column in columns:
        justify = "left" if left is None or column in left else "right"
        table.add_column(column, justify=justify, no_wrap=column in whole, overflow="fold" if folds else "ellipsis")
    return table
