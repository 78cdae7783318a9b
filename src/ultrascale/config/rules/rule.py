"""A rule of a run's description: what it reads, what must hold, and the function that finds what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from ultrascale.description.problems import Problem

Judged = TypeVar("Judged")


class Rule(NamedTuple, Generic[Judged]):
    """A row of the tables of rules (`run_rules.RULES`, `trainable.LAYOUT_RULES`)."""

    reads: tuple[str, ...]
    """Keys, or sections, that it depends on: where one of them cannot be read it says nothing."""
    check: Callable[[Judged], Iterable[Problem]]
    """Yields a problem, with its remedy, for everything that breaks the rule. Its docstring is the rule in words."""

    @property
    def says(self) -> str:
        return " ".join((self.check.__doc__ or "").split())
