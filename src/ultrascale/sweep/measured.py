"""One process after another that measures a cell, each with a time limit; a cell that fails takes no other with it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BufferedWriter

from ultrascale.sweep.cells import CellPlace, Failure

GRACE_SECONDS = 15.0
"""A process that is asked to end has so long."""


def measure_cells(
    places: Iterable[CellPlace], *, steps: int, warm: int, limit_seconds: float, done: Callable[[CellPlace], None]
) -> None:
    """Measure those of `places` that have no result and did not fail, in their order; `done` is told of each.

    A cell that another command is measuring is left to it, so that several can work in one folder.

    Interrupted, it ends the process at work and leaves that cell unmeasured.
    """
    for place in places:
        if place.result is None and place.failure is None:
            measure_cell(place, steps=steps, warm=warm, limit_seconds=limit_seconds)
        done(place)


def measure_cell(place: CellPlace, *, steps: int, warm: int, limit_seconds: float) -> None:
    """Measure one cell in a process of its own, and keep its result or its failure; nothing if another command is at it."""
    place.path.mkdir(parents=True, exist_ok=True)
    with place.log_file.open("ab") as log:
        if not _claim(log) or place.result is not None:
            return
        log.truncate(0)
        place.prepare()
        process = subprocess.Popen(
            command_of(place, steps=steps, warm=warm),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            place.fail(Failure("too slow", f"not done after {limit_seconds:,.0f} s"))
            return
        except BaseException:  # Ctrl-C, mostly
            _end(process)
            raise
        if code != 0 or place.result is None:
            place.fail(failure_of(code, place.log_file.read_text(errors="replace")))


def _claim(log: BufferedWriter) -> bool:
    """True if the cell of this log is ours now. The process that measures inherits the claim, and keeps it if we are killed."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def command_of(place: CellPlace, *, steps: int, warm: int) -> list[str]:
    """Command that measures a cell. On a cluster the same words run under its launcher: `torchrun ... -m ultrascale measure
    speed`."""
    words = [sys.executable, "-m", "ultrascale", "measure", "speed", str(place.run_file), "--out", str(place.result_file)]
    return [*words, "--steps", str(steps), "--warm", str(warm)]


def failure_of(exit_code: int, printed: str) -> Failure:
    """Failure of a process that `printed` this and ended with `exit_code` (minus the number of a signal)."""
    errors = re.findall(r"ultrascale: error(?: on rank \d+)?: (.*(?:\n\n?  .*)*)", printed)
    lines = [line for line in printed.splitlines() if line.strip()]
    text = (errors or lines[-1:] or ["it said nothing"])[0]
    text = " ".join(text.split())
    if re.search(r"ran out of memory|MemoryError|(?:CUDA |failure '|error: )out of memory", printed):
        return Failure("out of memory", text, exit_code)
    if exit_code < 0 or "SIGKILL" in printed:
        name = signal.Signals(-exit_code).name if exit_code < 0 else "SIGKILL"
        hint = " (as the kernel does where the host has no memory left)" if name == "SIGKILL" else ""
        return Failure("killed", f"ended by {name}{hint}", exit_code)
    return Failure("failed", text, exit_code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all it started: it leads a group of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return
