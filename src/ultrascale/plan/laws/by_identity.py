"""Cache of functions of machines. Those hold dictionaries and cannot be hashed, so identity is the key."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

First = TypeVar("First")
Result = TypeVar("Result")
Rest = TypeVarTuple("Rest")
MOST = 256
"""Most results that are cached; a calibration loop creates new devices all the time."""


def cached_by_identity(function: Callable[[First, *Rest], Result]) -> Callable[[First, *Rest], Result]:
    """`function`, its results cached by the identity of the first argument and the values of the others."""
    known: dict[tuple[object, ...], tuple[First, Result]] = {}

    @wraps(function)
    def cached(first: First, *rest: *Rest) -> Result:
        key = (id(first), *rest)
        if key not in known:
            if len(known) >= MOST:
                known.clear()
            known[key] = first, function(first, *rest)  # `first` is kept, so that its identity stays unique
        return known[key][1]

    return cached
