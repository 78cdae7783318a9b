"""Commands that tests start, and whatever these start in turn."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil


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
