"""Comparison of one step between trainer and reference: which quantities differ, where, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite, sqrt
from typing import Any

import torch

from ultrascale.check.oracle.reference import StepFacts
from ultrascale.train.optimizers.optimizer import MOMENTS

SMALLEST_SHARE = {"gradient": 1e-3, "moment": 1e-3, "weight": 0.1}
"""A tensor's error is relative to its own norm, but at least to this share of the norm of all tensors of its kind together.
Some gradients are zero except for rounding (GPT-2's biases of keys: softmax is invariant to them); a ratio of rounding errors
is not an error, and AdamW multiplies it by up to 1 / eps on its way into the weights. A fault is detected if it changes 1e-14
of the global gradient.
"""


@dataclass(frozen=True)
class Difference:
    """Relative error of one quantity at one step, against the reference; infinite for `copies` and `messages`."""

    step: int
    quantity: str
    """`loss`, `gradient norm`, `gradient`, `weight`, `moment` or `experts` (how often each was chosen, losses and biases for
    balance); `copies`: what ranks hold in common is not the same bits; or `messages`: not waited for, or overwritten."""
    name: str
    """The parameter; empty for loss and norm; of messages what is wrong."""
    error: float
    """|difference| / |reference|, 2-norms for tensors; see `SMALLEST_SHARE`."""

    def __str__(self) -> str:
        if self.quantity == "messages":
            return f"step {self.step}: {self.name}"
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
    failure: str = ""
    """Message of an error that a rank raised before the comparison; empty otherwise."""

    @property
    def holds(self) -> bool:
        return not self.beyond and not self.failure

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "holds": self.holds}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Verdict:
        """Verdict read back from the row that `to_json` made."""
        worst = {quantity: Difference(**difference) for quantity, difference in row["worst"].items()}
        beyond = tuple(Difference(**difference) for difference in row["beyond"])
        return cls(row["case"], row["tolerance"], worst, beyond, row.get("failure", ""))


def differences(step: int, observed: StepFacts, expected: StepFacts) -> Iterator[Difference]:
    """Every quantity of a step against the reference."""
    yield Difference(step, "loss", "", _relative(abs(observed.loss - expected.loss), abs(expected.loss)))
    yield Difference(step, "gradient norm", "", _relative(abs(observed.norm - expected.norm), abs(expected.norm)))
    for quantity, observed_by_name, expected_by_name in (
        ("gradient", observed.gradients, expected.gradients),
        ("weight", observed.weights, expected.weights),
        *(
            ("moment", observed.moments, {name: m for name, m in expected.moments.items() if name.startswith(f"{moment}.")})
            for moment in MOMENTS
        ),
    ):
        floor = SMALLEST_SHARE[quantity] * sqrt(sum(float(tensor.square().sum()) for tensor in expected_by_name.values()))
        for name, tensor in expected_by_name.items():
            yield Difference(step, quantity, name, relative_error(observed_by_name[name], tensor, floor=floor))
    for name, load in expected.experts.items():
        yield Difference(step, "experts", name, relative_error(observed.experts[name], load))
    for name in observed.differing:
        yield Difference(step, "copies", name, float("inf"))
    for name in observed.messages:
        yield Difference(step, "messages", name, float("inf"))


def judge(case: str, observed: list[StepFacts], expected: list[StepFacts], tolerance: float) -> Verdict:
    """The verdict over all steps of a case."""
    every = [d for step, pair in enumerate(zip(observed, expected, strict=True)) for d in differences(step, *pair)]
    worst: dict[str, Difference] = {}
    for difference in every:
        if difference.quantity not in worst or not difference.error <= worst[difference.quantity].error:
            worst[difference.quantity] = difference
    return Verdict(case, tolerance, worst, tuple(d for d in every if not d.error <= tolerance))


def relative_error(observed: torch.Tensor, expected: torch.Tensor, *, floor: float = 0.0) -> float:
    """||observed - expected|| / max(||expected||, floor); infinite if observed is not finite or not of that shape."""
    if observed.shape != expected.shape or not torch.isfinite(observed).all():
        return float("inf")
    return _relative(float((observed - expected).norm()), max(float(expected.norm()), floor))


def _relative(difference: float, size: float) -> float:
    if not isfinite(difference):
        return float("inf")
    return difference / size if size > 0 else difference
