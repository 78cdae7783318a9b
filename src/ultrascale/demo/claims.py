"""Claims of the demo, each with the measured number and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["holds", "fails", "missed", "skipped"]
MARKS: dict[Verdict, str] = {
    "holds": "[green]holds[/]", "fails": "[bold red]FAILS[/]", "missed": "[yellow]missed[/]", "skipped": "[yellow]skipped[/]",
}  # fmt: skip


class DemoError(RuntimeError):
    """The demo cannot continue."""


@dataclass(frozen=True)
class Claim:
    """One claim of the demo."""

    text: str
    number: str
    """Measured value; for `skipped`, what is missing."""
    verdict: Verdict
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The numbers themselves, JSON-able: bytes, seconds, nats."""


def judged(text: str, number: str, holds: bool, **facts: Any) -> Claim:
    """A claim decided by a number."""
    return Claim(text, number, "holds" if holds else "fails", facts)
