"""Registry of the code that plants faults, by name; `table` describes the faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ultrascale.check.faults.table import FAULTS
from ultrascale.train.trainer import Trainer

PLANTS: dict[str, Callable[[Trainer], AbstractContextManager[None]]] = {}
"""Filled by the modules of faults on import."""


def plants(name: str) -> Callable[[Callable[[Trainer], Iterator[None]]], Callable[[Trainer], Iterator[None]]]:
    """Register a generator that plants the fault `name` into a trainer before its `yield` and removes it after."""
    assert name in FAULTS and name not in PLANTS, name

    def register(plant: Callable[[Trainer], Iterator[None]]) -> Callable[[Trainer], Iterator[None]]:
        PLANTS[name] = contextmanager(plant)
        return plant

    return register
