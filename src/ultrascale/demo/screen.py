"""Output of the demo on a terminal: numbered headings, the command for each stage, a progress bar, a table of claims."""

from __future__ import annotations

import io
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from ultrascale.console import Trimmed, plain_table
from ultrascale.demo.claims import MARKS, Claim

WIDEST = 100
INDENT = 3
Advance = Callable[[float, str], None]
"""Called with a stage's progress, and a note to print beside the bar."""


@dataclass
class Screen:
    """Writes the demo's output to one console."""

    console: Console
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by title of the stage."""

    @classmethod
    def on(cls, *, stderr: bool) -> Screen:
        """A screen on standard output, or on stderr if stdout is for a program."""
        console = Console(stderr=stderr, highlight=False)
        if not console.is_terminal:
            file: Any = Trimmed("stderr" if stderr else "stdout")
            console = Console(file=file, highlight=False, width=None if "COLUMNS" in os.environ else WIDEST)
        console.width = min(WIDEST, console.width)
        return cls(console)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Print a numbered heading; the time of the stage is recorded under its title."""
        started = time.perf_counter()
        self.console.print(f"\n[bold blue]{len(self.spent) + 1}[/]  [bold]{title}[/]")
        yield
        self.spent[title] = time.perf_counter() - started

    def command(self, *words: str) -> None:
        """Print the command that does the same, for copying."""
        lines = [""]
        for word in map(shlex.quote, ("ultrascale", *words)):
            if len(lines[-1]) + len(word) > self.console.width - INDENT - 8:
                lines.append("   ")
            lines[-1] += f" {word}"
        text = " \\\n".join(f"{' ' * INDENT}{'$' if number == 0 else ' '}{line}" for number, line in enumerate(lines))
        self.console.print(f"[cyan]{escape(text)}[/]", soft_wrap=True)

    def show(self, item: RenderableType) -> None:
        """Print a line or two in rich's markup, or anything else, under the heading."""
        self.console.print(Padding(item, (0, 0, 0, INDENT), expand=False))

    def draw(self, draw_on: Callable[[Console], None]) -> None:
        """Print what a function draws on a console, under the heading."""
        narrow = Console(
            file=io.StringIO(), width=self.console.width - INDENT, highlight=False, force_terminal=self.console.is_terminal,
            color_system=self.console.color_system,  # pyright: ignore[reportArgumentType] (it takes a str)
        )  # fmt: skip
        with narrow.capture() as captured:
            draw_on(narrow)
        lines = (line.rstrip() for line in captured.get().splitlines())
        self.show(Text.from_ansi("\n".join(lines)))

    @contextmanager
    def bar(self, what: str, total: float) -> Iterator[Advance]:
        """A progress bar; without a terminal, one line per quarter."""
        if not self.console.is_terminal:
            yield self._quarters(what, total)
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn(" " * (INDENT - 1) + "{task.description}"), BarColumn(bar_width=28), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=total, note="")
            yield lambda done, note: progress.update(task, completed=done, note=note)

    def claims(self, claims: Sequence[Claim]) -> None:
        """Print the closing table."""
        table = plain_table("claim", "", "number", whole=("",), pad_edge=True, padding=(0, 2, 0, 0))
        for claim in claims:
            table.add_row(claim.text, MARKS[claim.verdict], claim.number)
        self.show(table)

    def _quarters(self, what: str, total: float) -> Advance:
        shown = [0]

        def advance(done: float, note: str) -> None:
            quarter = int(4 * done / total) if total else 4
            if quarter > shown[0]:
                shown[0] = quarter
                self.show(f"[dim]{what}  {min(100, round(100 * done / total))}%  {note}[/]")

        return advance
