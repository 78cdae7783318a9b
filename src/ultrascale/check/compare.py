"""Two accounts of the same step, side by side: what differs, where, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch

from ultrascale.check.reference import StepFacts


@dataclass(frozen=True)
class Difference:
    """How far one quantity is from the reference."""

    step: int
    quantity: str
    """`loss`, `gradient norm`, `gradient`, `weight` or `moment`."""
    name: str
    """The parameter; empty for loss and norm."""
    error: float
    """|difference| / |reference|, 2-norms for tensors."""

    def __str__(self) -> str:
        of = f" of {self.name}" if self.name else ""
        return f"step {self.step}: {self.quantity}{of} differs by {self.error:.1e}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one case."""

    case: str
    tolerance: float
    worst: dict[str, Difference]
    """The largest difference of each quantity."""
    beyond: tuple[Difference, ...]
    """Every difference above the tolerance, in order of discovery."""

    @property
    def holds(self) -> bool:
        return not self.beyond

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "holds": self.holds}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Verdict:
        """What `to_json` gave."""
        worst = {quantity: Difference(**difference) for quantity, difference in row["worst"].items()}
        return cls(row["case"], row["tolerance"], worst, tuple(Difference(**difference) for difference in row["beyond"]))


def differences(step: int, found: StepFacts, expected: StepFacts) -> Iterator[Difference]:
    """Every quantity of a step against the reference."""
    yield Difference(step, "loss", "", _relative(abs(found.loss - expected.loss), abs(expected.loss)))
    yield Difference(step, "gradient norm", "", _relative(abs(found.norm - expected.norm), abs(expected.norm)))
    for quantity, mine, theirs in (
        ("gradient", found.gradients, expected.gradients),
        ("weight", found.weights, expected.weights),
        ("moment", found.moments, expected.moments),
    ):
        for name, tensor in theirs.items():
            yield Difference(step, quantity, name, relative_error(mine[name], tensor))


def judge(case: str, found: list[StepFacts], expected: list[StepFacts], tolerance: float) -> Verdict:
    """The verdict over all steps of a case."""
    every = [d for step, pair in enumerate(zip(found, expected, strict=True)) for d in differences(step, *pair)]
    worst: dict[str, Difference] = {}
    for difference in every:
        if difference.quantity not in worst or not difference.error <= worst[difference.quantity].error:
            worst[difference.quantity] = difference
    return Verdict(case, tolerance, worst, tuple(d for d in every if not d.error <= tolerance))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||; infinite if found is not finite or not of that shape."""
    if found.shape != expected.shape or not torch.isfinite(found).all():
        return float("inf")
    return _relative(float((found - expected).norm()), float(expected.norm()))


def _relative(difference: float, size: float) -> float:
    if not isfinite(difference):
        return float("inf")
    return difference / size if size > 0 else difference
