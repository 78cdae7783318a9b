"""Console for tables for people: a terminal in its own width, a file or a pipe in lines as long as they are."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PAGE_WIDTH = 80
FILE_WIDTH = 200
"""Columns that a file or a pipe has: wider than any table, and a paragraph still ends somewhere."""


def console_for_people() -> Console:
    """A console that colours what we colour, and no numbers by itself. What is no terminal is neither cut to 80 columns (unless
    COLUMNS says so) nor padded with blanks at the ends of lines."""
    from rich.console import Console

    if sys.stdout is None or sys.stdout.isatty():
        return Console(highlight=False)
    file: Any = _Trimmed()
    return Console(highlight=False, file=file, width=None if "COLUMNS" in os.environ else FILE_WIDTH)


def drawing_width(console: Console) -> int:
    """Columns of a drawing that is cut into blocks: of a terminal all, of a file as many as a page has, or as COLUMNS says."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else PAGE_WIDTH


class _Trimmed:
    """Standard output, whatever it is at the time, without blanks at the ends of lines."""

    def write(self, text: str) -> int:
        """Write what is left of the text, and say that all of it was."""
        lines = text.split("\n")
        sys.stdout.write("\n".join([*(line.rstrip(" ") for line in lines[:-1]), lines[-1]]))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)
