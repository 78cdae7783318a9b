"""Measurements of a sweep, fastest first, and the planner's errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ultrascale.sweep.cells import CellPlace
from ultrascale.validation.scores import Errors, kendall_tau, summarise


@dataclass(frozen=True)
class MeasuredCell:
    """A cell with a result. Bytes, seconds."""

    place: CellPlace
    step_seconds: float
    """Median seconds of a step."""
    tokens_per_second_per_rank: float
    mfu: float
    planned_step_seconds: float | None
    planned_peak_bytes: int
    measured_peak_bytes: int | None
    planned_reserved_bytes: int | None
    measured_reserved_bytes: int | None
    result: dict[str, Any]
    """Contents of the result file."""

    @classmethod
    def of(cls, place: CellPlace) -> MeasuredCell | None:
        """Measurement of a cell; None if it was not measured."""
        result = place.result
        if result is None:
            return None
        step = median(result["step_seconds"])
        copied = (
            "mfu", "planned_step_seconds", "planned_peak_bytes", "measured_peak_bytes", "planned_reserved_bytes",
            "measured_reserved_bytes",
        )  # fmt: skip
        return cls(
            place, step, result["tokens_per_step"] / step / result["ranks"],
            **{name: result[name] for name in copied}, result=result,
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


def fastest_first(places: Sequence[CellPlace]) -> list[MeasuredCell]:
    """Measured cells, by tokens per second and rank."""
    measured = [measurement for place in places if (measurement := MeasuredCell.of(place)) is not None]
    return sorted(measured, key=lambda measurement: -measurement.tokens_per_second_per_rank)


def plan_accuracy(measured: Sequence[MeasuredCell]) -> Held:
    """Error of the plan over `measured`."""
    timed = [measurement for measurement in measured if measurement.planned_step_seconds is not None]
    planned = [_planned_rate(measurement) for measurement in timed]
    rates = [measurement.tokens_per_second_per_rank for measurement in timed]
    pick = max(range(len(timed)), key=planned.__getitem__, default=0)
    return Held(
        time=_errors("step time", [(measurement.planned_step_seconds, measurement.step_seconds) for measurement in timed]),
        memory=_errors(
            "live bytes", [(measurement.planned_peak_bytes, measurement.measured_peak_bytes) for measurement in measured]
        ),
        reserved=_errors(
            "reserved bytes",
            [(measurement.planned_reserved_bytes, measurement.measured_reserved_bytes) for measurement in measured],
        ),
        tau=kendall_tau(planned, rates) if len(timed) > 1 else None,
        regret=max(rates) / rates[pick] - 1 if len(timed) > 1 else None,
        machines=tuple(dict.fromkeys(_machine(measurement.result) for measurement in measured)),
    )


def _planned_rate(measurement: MeasuredCell) -> float:
    assert measurement.planned_step_seconds is not None
    return measurement.tokens_per_second_per_rank * measurement.step_seconds / measurement.planned_step_seconds


def _errors(name: str, pairs: Sequence[tuple[float | None, float | None]]) -> Errors | None:
    errors = [planned / measured - 1 for planned, measured in pairs if planned is not None and measured]
    return summarise(name, errors) if errors else None


def _machine(result: dict[str, Any]) -> str:
    facts = result["environment"]
    return f"{result['device']}, torch {facts['torch']}, ultrascale {facts['ultrascale']}"
