"""The process that feeds a run's trackers, as rank 0 has it beside itself."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

WAIT_SECONDS = 10.0
"""Seconds that the end of a run waits for trackers; the process itself goes on for some more."""
LOG = "tracked.log"
"""Log in the run's folder: the output of the trackers' libraries."""


class Follower:
    """A process that ends some seconds after this one, however this one ends."""

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
        """Say that no more rows will come, wait a little, and return what it has said."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(WAIT_SECONDS)
            return self.lines()
        except subprocess.TimeoutExpired:
            return [*self.lines(), "trackers have not taken every row yet, and are given some more seconds"]


RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables to remove: a library that reads them would take this process for a rank."""


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError:  # a full disk
        return subprocess.DEVNULL
