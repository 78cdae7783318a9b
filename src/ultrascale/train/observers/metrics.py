"""Metrics of a run: rows of numbers, one line on the console, a progress bar on a terminal.

`metrics.jsonl` is the reference; a child process of rank 0 feeds its rows to the trackers that the run names (`trackers`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ultrascale import console
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Run
from ultrascale.description.units import format_count, format_share
from ultrascale.launch.events import stamp
from ultrascale.run_rows import event_line, metric_line
from ultrascale.train.folder.run_folder import RunFolder

Row = dict[str, float | int | None]


def expect_trackers(run: Run) -> None:
    """Raises SpecError if a tracker that the run names is not installed."""
    missing = [name for name in run.log.sinks if find_spec(name) is None]
    if missing:
        remedy = f"pip install {' '.join(missing)}, or leave it out: metrics.jsonl has the same rows."
        raise SpecError([Problem("log.sinks", f"names {name}, which is not installed", remedy) for name in missing])


class Metrics:
    """Rows to `metrics.jsonl` and trackers, lines to the console and log.txt. Only rank 0's instance writes.

    A full disk does not end a healthy run: it is reported once, and the next checkpoint reports a lasting problem. Nor does a
    closed console: log.txt has every line.
    """

    def __init__(self, run: Run, folder: RunFolder, *, first_step: int, writes: bool):
        self.run, self.folder, self.writes = run, folder, writes
        self.follower = _follower(folder) if writes and run.log.sinks else None
        self.bar = _bar(first_step, run.steps) if writes and _is_terminal() else None
        self._warned = False
        self.has_console = True

    def row(self, step: int, values: Row, *, tables: Mapping[str, list[list[int]]] | None = None) -> None:
        """Record the values of the `step`th step of the run. `tables` are stored with them, but not sent to trackers."""
        known = {key: value for key, value in values.items() if value is not None}
        self._append(self.folder.metrics.name, metric_line(step, {"time": time.time(), **known, **(tables or {})}))
        self.lines(self.follower.lines() if self.follower is not None else [])

    def event(self, kind: str, **facts: Any) -> None:
        """Add a row to events.jsonl."""
        self._append("events.jsonl", event_line({**stamp(), "event": kind, **facts}))

    def problem(self, kind: str, step: int, message: str) -> None:
        """Report a problem with checkpoints, on the console and as an event."""
        self.line(message)
        self.event(kind, step=step, cause=message)

    def report(self, name: str, value: Any) -> None:
        """Replace a JSON file of the run's folder."""
        self._try(name, partial(self.folder.write_json, name, value))

    def line(self, text: str) -> None:
        """Print and log one line."""
        if not self.writes:
            return
        self._try("log.txt", partial(self.folder.append, "log.txt", text))
        if self.has_console and (why := self._show(text)):
            self._lose_console(why)

    def lines(self, texts: Iterable[str]) -> None:
        """Print and log lines."""
        for text in texts:
            self.line(text)

    def advance(self, steps_done: int) -> None:
        """Advance the progress bar."""
        if self.bar is not None and self.has_console:
            self.bar.update(self.bar.task_ids[0], completed=steps_done)

    def close(self) -> None:
        """Remove the bar from the terminal and let trackers finish."""
        self._stop_bar()
        self.lines(self.follower.close() if self.follower is not None else [])

    def _show(self, text: str) -> str:
        """Print a line on the console. Returns an empty string, or why that failed."""
        if self.bar is None:
            return console.print_line(text)
        try:
            self.bar.console.print(text, highlight=False, soft_wrap=True, markup=False)
        except OSError as error:
            return console.error_text(error)
        return ""

    def _lose_console(self, why: str) -> None:
        self.has_console = False
        self._stop_bar()
        console.redirect_to_null("stdout")
        message = f"warning: the console is gone ({why}): training goes on, and log.txt has every line"
        self._try("log.txt", partial(self.folder.append, "log.txt", message))
        self.event("console gone", cause=why)
        console.print_line(message, "stderr")

    def _stop_bar(self) -> None:
        if self.bar is not None:
            with suppress(OSError):  # a closed terminal
                self.bar.stop()

    def _append(self, name: str, line: str) -> None:
        self._try(name, partial(self.folder.append, name, line))

    def _try(self, name: str, write: Callable[[], None]) -> None:
        if not self.writes:
            return
        try:
            write()
        except OSError as error:
            if not self._warned:
                console.print_line(f"warning: {name} is not being written: {error}", "stderr")
            self._warned = True


def _follower(folder: RunFolder) -> Follower | None:
    try:
        return Follower(folder.path)
    except OSError as error:
        console.print_line(f"warning: no process for trackers could be started, training goes on without: {error}", "stderr")
        return None


def console_line(run: Run, values: Row, steps_done: int) -> str:
    """`step 10 loss 7.1234 gnorm 0.98 lr 3.0e-04 mem 61.2GiB (77%) tok/s 24,690 (12,345 a gpu) mfu 41.2% eta 1h02m`."""
    norm, loss, scale = (values.get(f"train/{key}") for key in ("grad_norm", "loss", "loss_scale"))
    overflow = "skipped: not finite" if scale is None else f"skipped: overflow at loss scale {scale:g}"
    parts = [f"step {steps_done}/{run.steps}", "no finite loss" if loss is None else f"loss {loss:.4f}"]
    parts.append(overflow if norm is None else f"gnorm {norm:.2f}")
    parts.append(f"lr {values['train/lr']:.1e}")
    for key, value in values.items():
        if key.startswith("val/loss"):
            shown = "unknown (no valid target)" if value is None else f"{value:.4f}"
            parts.append(f"val{key.removeprefix('val/loss').replace('/', ' ', 1)} {shown}")
    if (noise := values.get("train/noise_scale_tokens")) is not None:
        parts.append(f"noise {format_count(noise)}")
    if (memory := values.get("mem/peak_allocated_gib")) is not None:
        parts.append(f"mem {memory:.1f}GiB ({values['mem/peak_allocated_percent']:.0f}%)")
    if (speed := values.get("perf/tokens_per_s_per_gpu")) is None:
        return "  ".join([*parts, "(speed not yet known)"])
    total, unit = values["perf/tokens_per_s"] or speed, "gpu" if memory is not None else "rank"
    island = f" on one island of {run.islands.count}" if run.islands.count > 1 else ""
    parts.append(f"tok/s {total:,.0f}{island}" + (f" ({speed:,.0f} a {unit})" if round(total) != round(speed) else ""))
    parts.append(f"mfu {format_share(values['perf/mfu'])}")
    parts.append(f"eta {duration((run.steps - steps_done) * (values['perf/step_s'] or 0.0))}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """`1h02m`, `3m20s`, `12s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _is_terminal() -> bool:
    """True if stdout is a terminal, where rich can redraw a bar."""
    return sys.stdout is not None and sys.stdout.isatty()


def _bar(first_step: int, steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, transient=True)
    bar.add_task("training", total=steps, completed=first_step)
    bar.start()
    return bar


WAIT_SECONDS = 10.0
"""Seconds that the end of a run waits for trackers; their process continues for some more."""
LOG = "tracked.log"
"""Log in the run's folder: the output of the trackers' libraries."""


class Follower:
    """The trackers' process, which exits some seconds after this process, however this one ends."""

    def __init__(self, folder: Path):
        words = [sys.executable, "-m", "ultrascale.trackers", str(folder.resolve()), "--beside", str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
        log = _open_log(folder / LOG)
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
            )
        finally:
            if log != subprocess.DEVNULL:
                os.close(log)
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._out, False)
        self._text = b""

    def lines(self) -> list[str]:
        """Lines that it has printed since the last call."""
        with suppress(OSError):  # BlockingIOError: nothing
            while read := os.read(self._out, 65536):
                self._text += read
        *whole, self._text = self._text.split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def close(self) -> list[str]:
        """Signal that no more rows will come, wait a little, and return its output."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(WAIT_SECONDS)
            return self.lines()
        except subprocess.TimeoutExpired:
            return [*self.lines(), "trackers have not taken every row yet, and are given some more seconds"]


RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables to remove: a library that reads them would treat this process as a rank."""


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # a full disk
        return subprocess.DEVNULL
