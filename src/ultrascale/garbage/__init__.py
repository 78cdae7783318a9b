"""Python's search for cyclic garbage: rare while a command of ours imports, as usual once it trains.

torch, its compiler and the trainer are 500,000 objects that stay. Traversing them again and again while they are imported took
a fifth of the time of starting. Training collects as usual: a cycle may hold tensors.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """Collect after 50,000 new objects, until `collect_as_usual`."""
    gc.set_threshold(50_000, 20, 50)


def collect_as_usual() -> None:
    """Give back the thresholds that this process began with."""
    gc.set_threshold(*_USUAL)
