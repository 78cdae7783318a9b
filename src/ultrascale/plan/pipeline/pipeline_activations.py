"""Micro-batches in flight on a pipeline rank (live activations); they depend on the order of actions, not on durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.plan.pipeline.pipeline_program import program_of
from ultrascale.schedules.actions import Action, Kind

HOLDS = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
"""For each kind of pass: change of the number of micro-batches held whole, and of those waiting for W."""


@dataclass(frozen=True)
class InFlight:
    """Micro-batches in flight on a rank: their activations live from F to the end of B, partly to the end of W."""

    total: int
    """Peak over time, summed over the rank's stages."""
    waiting: int
    """Part of `total` past I at that moment: only the tensors for W are left."""
    by_stage: dict[int, int]
    """Peak of each stage, each at its own moment."""


def in_flight(name: str, pp: int, virtual_stages: int | None, num_micro_batches: int) -> list[InFlight]:
    """Micro-batches in flight on each rank of a named schedule. Raises SpecError as `build_schedule`."""
    return [rank_in_flight(row) for row in program_of(name, pp, num_micro_batches, virtual_stages).schedule]


def rank_in_flight(actions: Sequence[Action]) -> InFlight:
    """Micro-batches in flight on one rank, from its list of actions."""
    peak = (0, 0)
    whole: dict[int, int] = {}
    waiting: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in actions:
        for part in action.parts:
            stage = part.stage
            if part.kind is Kind.FORWARD:
                whole[stage] = whole.get(stage, 0) + 1
                most[stage] = max(most.get(stage, 0), whole[stage] + waiting.get(stage, 0))
                now = sum(waiting.values())
                peak = max(peak, (sum(whole.values()) + now, -now))
            elif part.kind is Kind.WEIGHT_GRADIENT:
                waiting[stage] -= 1
            else:
                whole[stage] -= 1
                if part.kind is Kind.INPUT_GRADIENT:
                    waiting[stage] = waiting.get(stage, 0) + 1
    return InFlight(peak[0], -peak[1], most)


def peak_activation_bytes(
    actions: Sequence[Action], sizes: Sequence[Sequence[float]], weights: Sequence[float]
) -> list[float]:  # fmt: skip
    """Peak bytes of activations on one rank, for each row of `sizes` ([rows, stages]: bytes of a micro-batch from F to I or B)
    and each of `weights` (fraction of these bytes left from I to W)."""
    parts = [part for action in actions for part in action.parts]
    holds = np.array([HOLDS[part.kind._value_] for part in parts]).T[:, None]
    whole, waiting = (holds * np.array(sizes)[:, [part.stage for part in parts]]).cumsum(axis=2)
    return (whole[:, None] + np.array(weights)[:, None] * waiting[:, None]).max(axis=2, initial=0.0).ravel().tolist()
