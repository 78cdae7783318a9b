"""The vocabulary of schedules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What one action does on its rank."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One thing a rank does with one micro-batch."""

    kind: Kind
    micro_batch: int
    reduce_gradients: bool = False
    """BACKWARD: gradients are cut and summed over the ranks that share a copy of the state, bucket by bucket as they are ready.
    Otherwise they stay here, whole."""
    sum_replicas: bool = False
    """BACKWARD: the reduced gradients are also summed over the copies of the state."""
    keep_parameters: bool = False
    """Gathered parameters stay whole afterwards, because a later action of the step needs them."""

    def __str__(self) -> str:
        marks = (
            ("r" if self.reduce_gradients else "") + ("s" if self.sum_replicas else "") + ("k" if self.keep_parameters else "")
        )
        return f"{self.kind.value}{self.micro_batch}{marks}"
