"""What waits between the two halves of a backward pass: of each linear layer its input and the gradient of its result."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ultrascale.plan.cut_backward import is_row_sum, may_wait
from ultrascale.plan.ledger import Held, Ledger
from ultrascale.spec.op_builders import is_fp8, native_room
from ultrascale.spec.model import Model
from ultrascale.spec.ops import Op, Shape
from ultrascale.spec.work import block_work


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


@lru_cache(maxsize=1 << 16)
def waiting_in_block(model: Model, layer: int, shape: Shape) -> int:
    """Bytes that decoder block `layer` leaves between I and W: every input of its linear layers once, and the gradient of each
    one's result, this rank's positions of it where tp sums it."""
    ops = block_work(model, layer, shape)
    made = {one.name: one.num_bytes for op in ops for one in op.makes}
    made["hidden"] = shape.outer_tokens * model.hidden_size * shape.itemsize
    parts = {op.reads[0]: op.makes[0].num_bytes for op in ops if is_row_sum(op)}
    waiting = [op for op in ops if may_wait(op)]
    inputs = {op.saves[0] for op in waiting}
    gradients = [(op, parts.get(op.makes[0].name, op.makes[0].num_bytes)) for op in waiting]
    return sum(made[name] for name in inputs) + sum(n // (shape.itemsize if is_fp8(op) else 1) for op, n in gradients)
