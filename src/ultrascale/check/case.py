"""One thing to prove."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.description.run import Run


@dataclass(frozen=True)
class Case:
    """A run (in float64, at a size a laptop can do), and the fault planted in it, if any."""

    name: str
    run: Run
    fault: str | None = None
