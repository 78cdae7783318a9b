"""Activations that live at once on a rank of a pipeline. They follow from the order of its actions, not from any prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.plan.pipeline.pipeline_program import program_of
from ultrascale.schedules.actions import Action, Kind

HOLDS = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
"""By kind of pass: micro-batches more that are held whole, and that wait for W."""


@dataclass(frozen=True)
class InFlight:
    """Micro-batches of one stage whose activations live on a rank at once: from F to the end of B, or in part to that of W."""

    total: int
    """The most, over all the rank's stages."""
    waiting: int
    """Part of `total` past I at that moment: only what W needs of them is left."""
    by_stage: dict[int, int]
    """The most of each stage; they need not be at one moment."""


def in_flight(name: str, pp: int, virtual_stages: int | None, num_micro_batches: int) -> list[InFlight]:
    """Activations that live at once on each rank. They follow from the order alone. Raises SpecError as `build_schedule`."""
    return [rank_in_flight(row) for row in program_of(name, pp, num_micro_batches, virtual_stages).schedule]


def rank_in_flight(actions: Sequence[Action]) -> InFlight:
    """Activations that live at once on one rank, from its list of actions."""
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
    """The most bytes of activations on one rank, of each row of `sizes` [rows, stages], of a micro-batch up to I or B, and each
    of `weights`, the part of it that is left from I to W."""
    parts = [part for action in actions for part in action.parts]
    holds = np.array([HOLDS[part.kind._value_] for part in parts]).T[:, None]
    whole, waiting = (holds * np.array(sizes)[:, [part.stage for part in parts]]).cumsum(axis=2)
    return (whole[:, None] + np.array(weights)[:, None] * waiting[:, None]).max(axis=2, initial=0.0).ravel().tolist()
