"""Faults that a run survives without a restart: a disk that is full, slow or fails once, a rank that is slow or stalls.

Each is real where possible: the kernel refuses the bytes (RLIMIT_FSIZE), the process is stopped (SIGSTOP). A file `N.healed`
records when it ended: the next save has succeeded, or the step is done.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ultrascale.checkpoint import Saver
from ultrascale.checkpoint.disk import files
from ultrascale.soak.storm import Planted, heal

STALL, SLOW_DISK = 0.375, 1.5
"""Fractions of the seconds that count as a hang: a rank stalls for less, and a save takes longer."""
MOST_FILE_BYTES = 4096
"""Bytes that fit on the full disk: the beginning of a shard."""


def next_save(folder: Path, fault: Planted, hang_seconds: float) -> None:
    """Make the next save of this process meet `fault`, which ends once a save succeeds."""
    disks = {
        "full-disk": _full,
        "flaky-disk": _flaky,
        "slow-disk": lambda: _first_write(lambda: time.sleep(SLOW_DISK * hang_seconds)),
    }
    save, meeting = Saver.save, [disks[fault.kind]]

    def met(saver: Saver, *arguments: Any, **options: Any) -> Path:
        with meeting.pop()() if meeting else nullcontext():
            published = save(saver, *arguments, **options)
        Saver.save = save
        heal(folder, fault)
        return published

    Saver.save = met  # pyright: ignore[reportAttributeAccessIssue]


def stand_still(hang_seconds: float) -> None:
    """Stop this process for a while; another process must continue it."""
    subprocess.Popen(["sh", "-c", f"sleep {STALL * hang_seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _full() -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _flaky() -> AbstractContextManager[None]:
    return _first_write(_fail)


def _fail() -> None:
    raise OSError(errno.EIO, "Input/output error (of the storm)")


@contextmanager
def _first_write(meets: Callable[[], None]) -> Iterator[None]:
    write = files._write_blocks

    def first(*arguments: Any) -> int:
        files._write_blocks = write
        meets()
        return write(*arguments)

    files._write_blocks = first
    try:
        yield
    finally:
        files._write_blocks = write
