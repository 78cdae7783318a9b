"""Activations that live at once on a rank of a pipeline. They follow from the order of its actions, not from any prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ultrascale.plan.pipeline.pipeline_program import program_of
from ultrascale.schedules.actions import Action, Kind


@dataclass(frozen=True)
class InFlight:
    """Micro-batches of one stage whose activations live on a rank at once: from F to the end of B, or in part to that of W."""

    total: int
    """The most, over all the rank's stages."""
    waiting: int
    """Of `total`, those past I at that moment: only what W needs of them is left."""
    by_stage: dict[int, int]
    """The most of each stage; they need not be at one moment."""


def in_flight(name: str, pp: int, virtual_stages: int | None, num_micro_batches: int) -> list[InFlight]:
    """Activations that live at once on each rank. They follow from the order alone. Raises SpecError as `build_schedule`."""
    return [rank_in_flight(row) for row in program_of(name, pp, num_micro_batches, virtual_stages).schedule]


def rank_in_flight(actions: Sequence[Action]) -> InFlight:
    """The same for one rank's list."""
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


def peak_activation_bytes(actions: Sequence[Action], whole: Sequence[float], waiting: Sequence[float]) -> float:
    """The most bytes of activations on one rank: `whole[stage]` a micro-batch up to I or B, `waiting[stage]` from I to W."""
    peak = now = 0.0
    for action in actions:
        for part in action.parts:
            if part.kind is Kind.FORWARD:
                now += whole[part.stage]
            elif part.kind is Kind.BACKWARD:
                now -= whole[part.stage]
            elif part.kind is Kind.INPUT_GRADIENT:
                now += waiting[part.stage] - whole[part.stage]
            else:
                now -= waiting[part.stage]
            peak = max(peak, now)
    return peak
