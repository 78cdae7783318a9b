"""What waits between the two halves of a backward pass: of each linear layer its input and the gradient of its result."""

from __future__ import annotations

from typing import NamedTuple

from ultrascale.plan.ledger import Held, Ledger
from ultrascale.spec.ops import Shape


class Waits(NamedTuple):
    """A weight whose gradient W will make, with what it is made of."""

    name: str
    held: tuple[Held, ...]
    source: Held
    """Of the two sides the one that tp cuts, which several products may have in common."""
    gathered_bytes: int
    """What W makes of that side for the product: all ranks' positions, and in fp8 what else the product needs."""
    sent_bytes: int
    """Of it, what is gathered over tp; 0 where it is whole here."""


def waiting_gradient(ledger: Ledger, shape: Shape, share: Held | None, arriving: Held) -> Held:
    """The gradient of a product's result: `share`, this rank's positions of it, if others have theirs. In fp8 rounded first."""
    own = arriving.hold() if share is None else share
    if shape.precision != "fp8":
        return own
    rounded = ledger.take("temporary", "gradients of activations", waiting_bytes(shape, own))
    ledger.drop(own)
    return rounded


def waiting_bytes(shape: Shape, gradient: Held) -> int:
    """Of a gradient as it waits."""
    return gradient.num_bytes // (shape.itemsize if shape.precision == "fp8" else 1)
