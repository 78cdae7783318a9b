"""What waits between the two halves of a backward pass: of each linear layer its input and the gradient of its result."""

from __future__ import annotations

from typing import NamedTuple

from ultrascale.plan.ledger import Held, Ledger
from ultrascale.spec.op_builders import is_fp8, native_room
from ultrascale.spec.ops import Op, Shape


class Waits(NamedTuple):
    """A weight whose gradient W will make, with what it is made of."""

    name: str
    held: tuple[Held, ...]
    source: Held
    """Of the two sides the one that tp cuts, which several products may have in common."""
    gathered_bytes: int
    """Of all ranks' positions of that side, which W gathers over tp; 0 where it is whole here."""
    room_bytes: int
    """What else the product needs in W."""


def waiting_gradient(ledger: Ledger, op: Op, shape: Shape, share: Held | None, arriving: Held) -> Held:
    """The gradient of a product `op`'s result: `share`, this rank's positions, if others have theirs. In fp8 rounded first."""
    own = arriving.hold() if share is None else share
    if not is_fp8(op):
        return own
    rounded = ledger.take("temporary", "gradients of activations", waiting_bytes(op, shape, own))
    ledger.drop(own)
    return rounded


def waiting_bytes(op: Op, shape: Shape, gradient: Held) -> int:
    """Of a gradient as it waits for the weight's of `op`."""
    return gradient.num_bytes // (shape.itemsize if is_fp8(op) else 1)


def waiting_room(op: Op, shape: Shape) -> int:
    """Of a product in fp8 that W makes: on CUDA both factors turned and filled up, on the CPU both and the result in fp32."""
    if op.product is None or not is_fp8(op):
        return 0
    m, n, k, _ = op.product
    if shape.device == "cpu":
        return shape.wide_itemsize * (m * n + m * k + n * k)
    return native_room(shape, n, m, k, lies=(False, False))
