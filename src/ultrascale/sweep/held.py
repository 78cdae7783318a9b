"""Measurements of a sweep, fastest first, and the error of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ultrascale.sweep.cells import Place
from ultrascale.validation.scores import Errors, kendall_tau, summarise


@dataclass(frozen=True)
class Measured:
    """A cell with a result. Bytes, seconds."""

    place: Place
    step_seconds: float
    """The median step."""
    spread: float
    """(slowest - fastest) / median of the timed steps."""
    tokens_per_second_per_rank: float
    mfu: float
    planned_step_seconds: float | None
    planned_peak_bytes: int
    measured_peak_bytes: int | None
    planned_reserved_bytes: int | None
    measured_reserved_bytes: int | None
    told: dict[str, Any]
    """The file whole."""

    @classmethod
    def of(cls, place: Place) -> Measured | None:
        """Measurement of a cell; None if it was not measured."""
        told = place.result
        if told is None:
            return None
        seconds = told["step_seconds"]
        step = median(seconds)
        kept = (
            "mfu", "planned_step_seconds", "planned_peak_bytes", "measured_peak_bytes", "planned_reserved_bytes",
            "measured_reserved_bytes",
        )  # fmt: skip
        return cls(
            place, step, (max(seconds) - min(seconds)) / step, told["tokens_per_step"] / step / told["ranks"],
            **{name: told[name] for name in kept}, told=told,
        )  # fmt: skip


@dataclass(frozen=True)
class Held:
    """The plan held to the sweep. None: there is nothing to compare."""

    time: Errors | None
    memory: Errors | None
    reserved: Errors | None
    tau: float | None
    """Kendall's tau of planned and measured tokens per second of a rank: 1 for the same order."""
    regret: float | None
    """Regret of the cell that the plan says is fastest: its measured time for a token over the best one's, less one."""
    machines: tuple[str, ...]
    """Devices and versions that results are from: more than one, and they compare machines, not layouts."""


def fastest_first(places: Sequence[Place]) -> list[Measured]:
    """Measured cells, by tokens per second and rank."""
    found = [one for place in places if (one := Measured.of(place)) is not None]
    return sorted(found, key=lambda one: -one.tokens_per_second_per_rank)


def hold(measured: Sequence[Measured]) -> Held:
    """Error of the plan over `measured`."""
    timed = [one for one in measured if one.planned_step_seconds is not None]
    planned = [_planned_rate(one) for one in timed]
    rates = [one.tokens_per_second_per_rank for one in timed]
    pick = max(range(len(timed)), key=planned.__getitem__, default=0)
    return Held(
        time=_errors("step time", [(one.planned_step_seconds, one.step_seconds) for one in timed]),
        memory=_errors("live bytes", [(one.planned_peak_bytes, one.measured_peak_bytes) for one in measured]),
        reserved=_errors("reserved bytes", [(one.planned_reserved_bytes, one.measured_reserved_bytes) for one in measured]),
        tau=kendall_tau(planned, rates) if len(timed) > 1 else None,
        regret=max(rates) / rates[pick] - 1 if len(timed) > 1 else None,
        machines=tuple(dict.fromkeys(_machine(one.told) for one in measured)),
    )


def _planned_rate(one: Measured) -> float:
    assert one.planned_step_seconds is not None
    return one.tokens_per_second_per_rank * one.step_seconds / one.planned_step_seconds


def _errors(name: str, pairs: Sequence[tuple[float | None, float | None]]) -> Errors | None:
    errors = [planned / measured - 1 for planned, measured in pairs if planned is not None and measured]
    return summarise(name, errors) if errors else None


def _machine(told: dict[str, Any]) -> str:
    facts = told["environment"]
    return f"{told['device']}, torch {facts['torch']}, ultrascale {facts['ultrascale']}"
