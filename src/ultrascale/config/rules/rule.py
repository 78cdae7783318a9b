"""A rule of a run's configuration: the keys it reads, and the function that finds violations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from ultrascale.description.problems import Problem

Judged = TypeVar("Judged")


class Rule(NamedTuple, Generic[Judged]):
    """A row of the tables of rules (`run_rules.RULES`, `trainable.LAYOUT_RULES`)."""

    reads: tuple[str, ...]
    """Keys, or sections, that the rule depends on: it is skipped if one of them cannot be read."""
    check: Callable[[Judged], Iterable[Problem]]
    """Yields a problem, with its remedy, for every violation. Its docstring is the text of the rule."""

    @property
    def says(self) -> str:
        return " ".join((self.check.__doc__ or "").split())
