"""Processes that do not run the script which starts them a second time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType

_HIDING = RLock()


@contextmanager
def hidden_main() -> Iterator[None]:
    """Processes that multiprocessing starts within import no `__main__`: a script or notebook without a guard, or one that is
    read from stdin, would run again there. What they call is a function of an importable module."""
    with _HIDING:  # of two threads the later would take the stand-in for what it puts back
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
