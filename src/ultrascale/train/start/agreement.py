"""Comparison of the run description across ranks. Ranks that were started with different descriptions fail at the start."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Run
from ultrascale.parallel.mesh import Ranks


def expect_same_run(run: Run, ranks: Ranks) -> None:
    """Raise SpecError, on every rank, that names each key whose value differs between ranks. Collective."""
    of_ranks = ranks.gather_json(settings(run))
    problems = [
        _problem(key, [values.get(key) for values in of_ranks])
        for key in sorted({key for values in of_ranks for key in values})
    ]
    if mismatches := [problem for problem in problems if problem is not None]:
        raise SpecError(mismatches)


def settings(run: Run) -> dict[str, str]:
    """Every setting of `run` as text, by its dotted key."""
    texts: dict[str, str] = {}

    def add(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(f"{prefix}{key}.", value)
            else:
                texts[f"{prefix}{key}"] = json.dumps(value, default=str)

    add("", asdict(run))
    return texts


def _problem(key: str, values: list[str | None]) -> Problem | None:
    """Problem for a setting that differs between ranks, from its value on each rank; None if all agree."""
    if len(set(values)) == 1:
        return None
    most = Counter(values).most_common(1)[0][0]
    odd = next(rank for rank, value in enumerate(values) if value != most)
    rule = f"differs between ranks: rank {odd} was started with {values[odd]}, rank {values.index(most)} with {most}"
    return Problem(key, rule, "Start every rank with the same description.")
