"""Processes that multiprocessing starts: they do not run the script a second time, and end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_HIDING = threading.RLock()


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


def end_with_parent() -> None:
    """End this process once its parent is gone. (Of forked ranks the last sees it first: the others' pipes are open in it.)"""
    threading.Thread(target=_leave_after_parent, daemon=True).start()


def _leave_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
