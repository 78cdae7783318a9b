"""Problems in a run's configuration, collected so that all of them are reported together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

MOST_LETTERS = 1200
"""Most characters of each part of a problem; a longer one quotes a long value, and is shortened in the middle."""
MOST_PROBLEMS = 100
"""Most problems reported; a file of another kind has a million."""


@dataclass(frozen=True)
class Problem:
    """One mistake: its key, the rule that is broken, and the remedy."""

    key: str
    """Dotted key (`layout.dp`), or a file with its line (`run.toml:12`)."""
    rule: str
    """Broken rule, with the given value."""
    remedy: str
    """Remedy: a value, a key or a command."""
    where: str = ""
    """Source of the value: a file with its line, `flag`, `default`."""

    def __post_init__(self) -> None:
        """Shorten long quoted values in the middle."""
        for name in ("key", "rule", "remedy", "where"):
            text = getattr(self, name)
            if len(text) > MOST_LETTERS:
                half = MOST_LETTERS // 2
                object.__setattr__(self, name, f"{text[:half]} ... {text[-half:]}")

    def __str__(self) -> str:
        origin = f" (from {self.where})" if self.where else ""
        return f"{self.key}{origin}: {self.rule}. {self.remedy}"


class SpecError(ValueError):
    """Invalid configuration. Carries every `Problem` found, not only the first; of thousands, the first hundred."""

    def __init__(self, problems: Sequence[Problem]):
        more = len(problems) - MOST_PROBLEMS
        summary = [Problem(f"{more:,} more", "are wrong too", "Repair these first.")] if more > 0 else []
        self.problems = (*problems[:MOST_PROBLEMS], *summary)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def expect_none(problems: Sequence[Problem]) -> None:
    """Raises SpecError with all `problems`, if there are any."""
    if problems:
        raise SpecError(problems)


def mistake(key: str, rule: str, remedy: str, where: str = "") -> SpecError:
    """A SpecError with a single `Problem`."""
    return SpecError([Problem(key, rule, remedy, where)])


def did_you_mean(word: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """`Did you mean A, B or C?`, with the `most` names that are most like `word`; `otherwise` if none is."""
    similar = get_close_matches(word, list(known), n=most, cutoff=cutoff)
    return f"Did you mean {one_of(similar)}?" if similar else otherwise


def one_of(names: Sequence[str]) -> str:
    """`A, B or C`."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
