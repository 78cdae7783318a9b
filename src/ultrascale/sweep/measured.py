"""Measures cells one after the other, each in a process with a time limit; a failing cell does not affect others."""

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
"""Seconds that a process has to exit after it is asked to."""


def measure_cells(
    places: Iterable[CellPlace], *, steps: int, warm: int, limit_seconds: float, done: Callable[[CellPlace], None]
) -> None:
    """Measure the `places` without a result or failure, in order; `done` is called for each.

    Skips a cell that another command is measuring, so that several commands can work in one folder.

    On interruption, ends the running process and leaves that cell unmeasured.
    """
    for place in places:
        if place.result is None and place.failure is None:
            measure_cell(place, steps=steps, warm=warm, limit_seconds=limit_seconds)
        done(place)


def measure_cell(place: CellPlace, *, steps: int, warm: int, limit_seconds: float) -> None:
    """Measure one cell in a separate process, and store its result or failure; does nothing if another command measures it."""
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
    """True if this command could lock the cell of this log. The measuring process inherits the lock, and keeps it if this one
    is killed."""
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
    """Kill the process and all its children: it leads its own process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return
