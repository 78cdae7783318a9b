"""Ranges of single numbers and names: the values allowed whatever the rest of the run."""

from __future__ import annotations

import re
from math import inf
from typing import Any

from ultrascale.description import layout
from ultrascale.description.architecture import model
from ultrascale.description.problems import Problem
from ultrascale.description.sections import islands

MOST = 2**53
"""Largest number of steps or tokens: integers up to it are exact as doubles, which most readers of metrics.jsonl use."""
LONGEST_WAIT = 2_000_000.0
"""23 days in seconds: the system's waits count milliseconds in 32 bits."""

# key: lowest, highest value. None as a value is always allowed where the field allows it.
_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, MOST), "seed": (0, 2**63 - 1),
    "batch.sequence_length": (1, MOST), "batch.sequences_per_batch": (1, MOST),
    "optimizer.learning_rate": (0, inf), "optimizer.warmup_steps": (0, MOST), "optimizer.decay_steps": (1, MOST),
    "optimizer.min_learning_rate_ratio": (0, 1), "optimizer.weight_decay": (0, inf),
    "checkpoint.every_steps": (1, MOST), "checkpoint.keep": (0, MOST), "checkpoint.failures_allowed": (0, MOST),
    "checkpoint.keep_every_steps": (1, MOST),
    "evaluation.every_steps": (1, MOST), "evaluation.sequences": (1, MOST),
    "islands.count": (1, islands.MOST_ISLANDS), "islands.every_steps": (1, MOST), "islands.fragments": (1, 1_000_000),
    "islands.overlap_steps": (0, MOST), "islands.quorum": (0, islands.MOST_ISLANDS), "loss_scale.growth_steps": (1, MOST),
    "log.every_steps": (1, MOST), "log.memory_steps": (0, MOST),
}  # fmt: skip
_RANGES |= {f"faults.{key}": (1, MOST) for key in ("digest_every_steps", "repeat_every_steps", "straggler_steps")} | {
    "faults.spike_factor": (1, inf)
}
_RANGES |= {f"layout.{key}": limits for key, limits in layout.RANGES.items()}
_RANGES |= {f"model.{key}": limits for key, limits in model.RANGES.items()}
_ABOVE_ZERO = (
    "collective_timeout_seconds", "optimizer.eps", "optimizer.clip_grad_norm", "faults.hang_seconds", "islands.silent_seconds",
)  # fmt: skip
_WAITS = ("collective_timeout_seconds", "faults.hang_seconds", "islands.silent_seconds")
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "islands.outer.momentum")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"^\$|\$[A-Za-z_]|\$\{[A-Za-z_]")


def limits_of(key: str) -> dict[str, float]:
    """Range of a number in the terms of JSON Schema: minimum, maximum, exclusiveMinimum, exclusiveMaximum."""
    low, high = _RANGES.get(key, (-inf, inf))
    limits = {"minimum": 0 if key in _BELOW_ONE else low, "maximum": LONGEST_WAIT if key in _WAITS else high}
    limits |= {"exclusiveMinimum": 0} if key in _ABOVE_ZERO else {}
    limits |= {"exclusiveMaximum": 1} if key in _BELOW_ONE else {}
    return {name: value for name, value in limits.items() if abs(value) != inf}


def range_problem(key: str, value: Any) -> Problem | None:
    """Problem of one number or name that is out of range, whatever the rest of the run."""
    if value is None:
        return None
    if key in _RANGES:
        low, high = _RANGES[key]
        if not low <= value <= high:
            if value < low:
                return Problem(key, f"must be at least {low}, is {value}", f"Give {low} or more.")
            if high == MOST:
                return Problem(key, f"must be at most {high:,}, is {value}", "Give a smaller number.")
            return Problem(key, f"must be from {low} to {high}, is {value}", "Give a value between them.")
    if key in _WAITS and value > LONGEST_WAIT:
        return Problem(key, f"must be at most {LONGEST_WAIT:.0f} seconds, is {value}", "Give a shorter time; 600 is usual.")
    if key in _ABOVE_ZERO and value <= 0:
        or_none = ', or "none" for no clipping' if key == "optimizer.clip_grad_norm" else ""
        return Problem(key, f"must be above 0, is {value}", f"Give a positive number{or_none}.")
    if key in _BELOW_ONE and not 0 <= value < 1:
        return Problem(key, f"must be at least 0 and below 1, is {value}", "0.9 and 0.95 are usual.")
    if key == "name" and not _NAME.fullmatch(value):
        rule = f"must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit, is {value!r}"
        return Problem(key, rule, "Rename the run.")
    if key == "folder" and not value:
        return Problem(key, "must not be empty", 'Write "." for the current folder.')
    if key == "folder" and (value.startswith("~") or _VARIABLE.search(value)):
        named = "" if _VARIABLE.search(value) else f"; a folder of that very name is {f'./{value}'!r}"
        remedy = f"Write the whole path{named}."
        return Problem(key, f"is {value!r}, which a shell would expand and a run's description does not", remedy)
    return None
