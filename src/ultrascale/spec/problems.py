"""Mistakes in a description, collected so that all of them are told at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake: the key it is about, the rule it breaks, and what to do."""

    key: str
    """Dotted key (`layout.dp`), or a file with its line (`run.toml:12`)."""
    rule: str
    """What was expected and what was found."""
    remedy: str
    """What to do about it."""
    where: str = ""
    """Where the value came from: a file, `flag`, `default`."""

    def __str__(self) -> str:
        origin = f" (from {self.where})" if self.where else ""
        return f"{self.key}{origin}: {self.rule}. {self.remedy}"


class SpecError(ValueError):
    """The description is wrong. Carries every `Problem` found, not only the first."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
