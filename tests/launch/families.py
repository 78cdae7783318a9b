"""Commands that tests start, and whatever these start in turn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ultrascale.config.resolve import to_toml
from ultrascale.demo.stages.interrupted import worker_pids
from ultrascale.description.run import Run

PATIENCE = 400.0
"""Seconds for what takes ten where nobody else computes; what must come within a time is asserted where it is."""


@contextmanager
def ended_after(process: subprocess.Popen[Any]) -> Iterator[None]:
    """At the end `process` and all that it has started are killed, if it is still there."""
    family = [psutil.Process(process.pid)]
    try:
        yield
    finally:
        if process.poll() is None:
            family += psutil.Process(process.pid).children(recursive=True)
            for member in reversed(family):
                member.kill()
        process.communicate()


@contextmanager
def launched(run: Run) -> Iterator[subprocess.Popen[str]]:
    """`ultrascale train` of `run` in a process of its own; whatever is left of it at the end is killed."""
    file = Path(run.folder) / f"{run.name}.toml"
    file.write_text(to_toml(run))
    command = [sys.executable, "-m", "ultrascale", "train", str(file)]
    temporary(run).mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary(run))}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with ended_after(process):
        yield process


def temporary(run: Run) -> Path:
    """The folder for temporary files of a command."""
    return Path(run.folder) / "tmp"


def left_behind(run: Run) -> list[str]:
    """But for torch's cache of compiled kernels, which is meant to stay."""
    return [path.name for path in temporary(run).iterdir() if not path.name.startswith("torchinductor_")]


def fork_server_of(process: subprocess.Popen[str]) -> psutil.Process | None:
    children = psutil.Process(process.pid).children()
    return next((child for child in children if any("forkserver" in word for word in child.cmdline())), None)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str], *, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"ended or too slow: {process.communicate()[0] if process.poll() is not None else 'running'}")
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in worker_pids(process.pid)]


def says_what_rank_0_met(cause: str) -> bool:
    """True if the cause of a failure of rank 1 says what rank 0 met: in a collective, in a save, or, if it was ended before it
    could say so, where its last sign of life had it wait."""
    met = r"waited for rank 1 in|lost contact with rank 1 while saving or loading|waited in"
    return re.search(f"; rank 0 ({met}) ", cause) is not None
