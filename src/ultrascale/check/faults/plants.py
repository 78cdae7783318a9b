"""Registry of the code that plants faults, by name; `table` describes the faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ultrascale.check.faults.table import FAULTS
from ultrascale.train.trainer import Trainer

Plant = AbstractContextManager[Any]
"""Context in which a trainer has a fault."""

PLANTS: dict[str, Callable[[Trainer], Plant]] = {}
"""Filled by the modules of faults on import."""


def plants(name: str) -> Callable[[Callable[[Trainer], Plant]], Callable[[Trainer], Plant]]:
    """Register a function that plants the fault `name` into a trainer."""
    assert name in FAULTS and name not in PLANTS, name

    def register(plant: Callable[[Trainer], Plant]) -> Callable[[Trainer], Plant]:
        PLANTS[name] = plant
        return plant

    return register
