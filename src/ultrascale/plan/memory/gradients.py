"""Gradients of weights, from the operation that makes them to the bucket that reduces them.

What waits between the two halves of a backward pass: of each linear layer its input and the gradient of its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ultrascale.plan.memory.ledger import Held, Ledger
from ultrascale.plan.memory.sharding import Shards
from ultrascale.plan.memory.stage_work import StageWork
from ultrascale.work.op_builders import native_room
from ultrascale.work.ops import Op, Shape


class WeightGradients:
    """Gradients of a stage's weights before FSDP2 takes them. `itemsize`: bytes of an element as autograd makes it."""

    def __init__(self, ledger: Ledger, work: StageWork, shards: Shards, itemsize: int):
        self.ledger, self.work, self.shards, self.itemsize = ledger, work, shards, itemsize
        self._arrived: Counter[str] = Counter()
        self._pending: dict[str, Held] = {}

    def state(self) -> Hashable:
        """Gradients of several uses, of which some have arrived."""
        return tuple(sorted(self._arrived.items()))

    def make(self, name: str) -> Held:
        """A new gradient of one use of a weight."""
        _, weight = self.work.by_name[name]
        return self.ledger.take("temporary", "gradients of weights", weight.numel * self.itemsize)

    def arrive(self, name: str, gradient: Held) -> None:
        """A gradient reaches its weight; one of several uses waits for the rest first, and each sum is a tensor of its own."""
        if name in self.work.uses:
            if name in self._pending:
                total = self.ledger.take("temporary", "gradients of weights", gradient.num_bytes)
                self.ledger.drop(self._pending.pop(name))
                self.ledger.drop(gradient)
                gradient = total
            self._arrived[name] += 1
            if self._arrived[name] < self.work.uses[name]:
                self._pending[name] = gradient
                return
            del self._arrived[name]
        bucket, weight = self.work.by_name[name]
        self.shards.add_gradient(bucket, weight, gradient)


class Waits(NamedTuple):
    """A weight whose gradient W will make, with what it is made of."""

    name: str
    held: tuple[Held, ...]
    source: Held
    """Input or gradient of the product, whichever tp cuts; several products may share it."""
    gathered_bytes: int
    """Bytes of that side at all ranks' positions, which W all-gathers over tp; 0 where it is whole here."""
    room_bytes: int
    """Bytes of temporary memory that the product needs besides in W."""


class WaitsLeft(NamedTuple):
    """Gradients and inputs that I of a block leaves for W, to be had again of another block."""

    held: tuple[tuple[str, str, int, int], ...]
    """Category, label, bytes and holders; first those of the gradient that came in, of which the bytes are not looked at."""
    weights: tuple[tuple[str, tuple[int, ...], int, int, int], ...]
    """`Waits`, with names within the block and places in `held`."""

    def of(self, layer: int, given: Held) -> list[Waits]:
        """Block `layer`'s own, which was given this gradient."""
        held = [given, *(Held(*one) for one in self.held[1:])]
        given.holders += self.held[0][3] - 1  # its own is gone
        return [
            Waits(f"layers.{layer}.{name}", tuple(held[at] for at in places), held[source], gathered, room)
            for name, places, source, gathered, room in self.weights
        ]


def waits_left(waits: Sequence[Waits], layer: int, given: Held, holders: int) -> WaitsLeft | None:
    """`waits` of block `layer`, to which the gradient `given` came with so many holders; None if others hold some of it too."""
    start, places, uses = f"layers.{layer}.", {id(given): 0}, Counter[int]()
    held = [given]
    for one in waits:
        for each in one.held:
            if places.setdefault(id(each), len(held)) == len(held):
                held.append(each)
            uses[id(each)] += 1
    if given.holders != holders - 1 + uses[id(given)] or any(one.holders != uses[id(one)] for one in held[1:]):
        return None
    told = [(one.category, one.label, one.num_bytes, uses[id(one)]) for one in held]
    weights = [
        (one.name.removeprefix(start), tuple(places[id(each)] for each in one.held), places[id(one.source)],
         one.gathered_bytes, one.room_bytes)
        for one in waits
    ]  # fmt: skip
    return WaitsLeft(tuple(told), tuple(weights))


def waiting_gradient(ledger: Ledger, op: Op, shape: Shape, share: Held | None, arriving: Held) -> Held:
    """The gradient of a product `op`'s result: `share`, this rank's positions, if others have theirs. In fp8 rounded first."""
    own = arriving.hold() if share is None else share
    if not op.in_fp8:
        return own
    rounded = ledger.take("temporary", "gradients of activations", waiting_bytes(op, shape, own))
    ledger.drop(own)
    return rounded


def waiting_bytes(op: Op, shape: Shape, gradient: Held) -> int:
    """Bytes of `gradient` while it waits for the weight gradient of `op`: an element takes one byte in fp8."""
    return gradient.num_bytes // (shape.itemsize if op.in_fp8 else 1)


def waiting_room(op: Op, shape: Shape) -> int:
    """Temporary bytes of a product in fp8 that W makes: on CUDA both factors transposed and padded, on the CPU both and the
    result in fp32. 0 for other products."""
    if op.product is None or not op.in_fp8:
        return 0
    m, n, k, _ = op.product
    if shape.device == "cpu":
        return shape.wide_itemsize * (m * n + m * k + n * k)
    return native_room(shape, n, m, k, lies=(False, False))
