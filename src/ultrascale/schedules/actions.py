"""The vocabulary of schedules.

A pipeline schedule is one list of actions per pipeline rank. The model is cut into stages, numbered along the forward pass; a
rank may hold several. `F` and `B` pass one micro-batch through one stage; `I` and `W` are the halves of `B`: the gradient of
the input, for which the previous stage waits, and those of the weights, for which no rank waits (Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

MANY = 1 << 15
"""Cached actions of a kind: a search builds the same ones for hundreds of pipelines."""


class Kind(Enum):
    """Pass of an action: forward (F), backward (B), or half of a backward pass: input gradient (I) or weight gradient (W)."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One pass of one micro-batch on a rank. A named tuple, because a step of a large pipeline has tens of thousands."""

    kind: Kind
    micro_batch: int
    stage: int = 0
    """Stage of the whole pipeline, numbered along the forward pass."""
    overlapped_with: Action | None = None
    """FORWARD: the BACKWARD of another micro-batch that runs at the same time, so that one hides the other's communication."""
    reduce_gradients: bool = False
    """BACKWARD: gradients are reduce-scattered over the ranks that share one copy of the state, bucket by bucket as they are
    ready. Otherwise they stay on the rank, unsharded."""
    sum_replicas: bool = False
    """BACKWARD: the reduced gradients are also summed over the replicas of the state."""
    keep_parameters: bool = False
    """All-gathered parameters are kept afterwards, because a later action of the step needs them."""

    def __str__(self) -> str:
        marks = (
            ("r" if self.reduce_gradients else "") + ("s" if self.sum_replicas else "") + ("k" if self.keep_parameters else "")
        )
        return f"{self.kind.value}{self.micro_batch}{marks}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Passes that run at the same time: this one and the overlapped one."""
        return (self,) if self.overlapped_with is None else (self, self.overlapped_with)

    @property
    def cell(self) -> str:
        """As `torch.distributed.pipelining` writes it in a CSV: `2F0`, or `(0F4;3B0)OVERLAP_F_B` for a pair."""
        if self.overlapped_with is not None:
            return f"({self._replace(overlapped_with=None).cell};{self.overlapped_with.cell})OVERLAP_F_B"
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


def _pass_of(kind: Kind) -> Callable[[int, int], Action]:
    """Action of a kind by stage and micro-batch, cached."""
    return lru_cache(maxsize=MANY)(lambda stage, micro_batch: Action(kind, micro_batch, stage))


forward = _pass_of(Kind.FORWARD)
"""F: one micro-batch through one stage."""
backward = _pass_of(Kind.BACKWARD)
"""B: all gradients of one micro-batch in one stage."""
input_gradient = _pass_of(Kind.INPUT_GRADIENT)
"""I: the gradient of the stage's input."""
weight_gradient = _pass_of(Kind.WEIGHT_GRADIENT)
"""W: the gradients of the stage's weights."""


def splits_backward(*rows: Sequence[Action]) -> bool:
    """True if backward passes in these actions of ranks are in halves, I and W."""
    return any(part.kind is Kind.INPUT_GRADIENT for row in rows for action in row for part in action.parts)


def overlapped(ahead: Action, back: Action) -> Action:
    """A FORWARD and a BACKWARD that run at the same time."""
    return Action(*ahead[:3], back, *ahead[4:])


def only_micro_batches(actions: list[Action], count: int) -> list[Action]:
    """`actions` without micro-batches from `count` on. Stays executable, as micro-batches do not depend on each other."""
    if all(part.micro_batch < count for action in actions for part in action.parts):
        return actions
    kept = [(action, [part for part in action.parts if part.micro_batch < count]) for action in actions]
    return [action if action.parts == tuple(left) else left[0]._replace(overlapped_with=None) for action, left in kept if left]
