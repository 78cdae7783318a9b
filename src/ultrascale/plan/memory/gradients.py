"""Gradients of weights, from the operation that makes them to the bucket that reduces them.

What waits between the two halves of a backward pass: of each linear layer its input and the gradient of its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.plan.memory.sharding import Shards
from ultrascale.plan.memory.stage_work import StageWork
from ultrascale.work.op_builders import native_scratch_bytes
from ultrascale.work.ops import Op, Shape


class StageGradients:
    """Gradients of a stage's weights before FSDP2 takes them. `itemsize`: bytes of an element as autograd makes it."""

    def __init__(self, ledger: Ledger, work: StageWork, shards: Shards, itemsize: int):
        self.ledger, self.work, self.shards, self.itemsize = ledger, work, shards, itemsize
        self._arrived: Counter[str] = Counter()
        self._pending: dict[str, Allocation] = {}

    def state(self) -> Hashable:
        """Gradients of several uses, of which some have arrived."""
        return tuple(sorted(self._arrived.items()))

    def make(self, name: str) -> Allocation:
        """A new gradient of one use of a weight."""
        _, weight = self.work.by_name[name]
        return self.ledger.take("temporary", "gradients of weights", weight.numel * self.itemsize)

    def arrive(self, name: str, gradient: Allocation) -> None:
        """A gradient reaches its weight; one of several uses waits for the rest first, and each sum is a tensor of its own."""
        if name in self.work.uses:
            if name in self._pending:
                total = self.ledger.take("temporary", "gradients of weights", gradient.num_bytes)
                self.ledger.release(self._pending.pop(name))
                self.ledger.release(gradient)
                gradient = total
            self._arrived[name] += 1
            if self._arrived[name] < self.work.uses[name]:
                self._pending[name] = gradient
                return
            del self._arrived[name]
        bucket, weight = self.work.by_name[name]
        self.shards.add_gradient(bucket, weight, gradient)


class DeferredGradient(NamedTuple):
    """A weight whose gradient W will make, with what it is made of."""

    name: str
    allocations: tuple[Allocation, ...]
    source: Allocation
    """Input or gradient of the product, whichever tp cuts; several products may share it."""
    gathered_bytes: int
    """Bytes of that side at all ranks' positions, which W all-gathers over tp; 0 where it is whole here."""
    scratch_bytes: int
    """Bytes of temporary memory that the product needs besides in W."""


class DeferredSnapshot(NamedTuple):
    """Gradients and inputs that I of a block leaves for W, to be had again of another block."""

    allocations: tuple[tuple[str, str, int, int], ...]
    """Category, label, bytes and holders; first those of the gradient that came in, of which the bytes are not looked at."""
    weights: tuple[tuple[str, tuple[int, ...], int, int, int], ...]
    """`DeferredGradient`, with names within the block and places in `allocations`."""

    def of(self, layer: int, incoming: Allocation) -> list[DeferredGradient]:
        """Block `layer`'s own, which was given this gradient."""
        allocations = [incoming, *(Allocation(*fields) for fields in self.allocations[1:])]
        incoming.holders += self.allocations[0][3] - 1  # its own is gone
        return [
            DeferredGradient(
                f"layers.{layer}.{name}",
                tuple(allocations[place] for place in places),
                allocations[source],
                gathered,
                scratch_bytes,
            )
            for name, places, source, gathered, scratch_bytes in self.weights
        ]


def deferred_snapshot(
    deferred: Sequence[DeferredGradient], layer: int, incoming: Allocation, holders: int
) -> DeferredSnapshot | None:
    """`deferred` of block `layer`, to which the gradient `incoming` came with so many holders; None if others hold some too."""
    start, places, uses = f"layers.{layer}.", {id(incoming): 0}, Counter[int]()
    allocations = [incoming]
    for entry in deferred:
        for tensor in entry.allocations:
            if places.setdefault(id(tensor), len(allocations)) == len(allocations):
                allocations.append(tensor)
            uses[id(tensor)] += 1
    if incoming.holders != holders - 1 + uses[id(incoming)] or any(
        allocation.holders != uses[id(allocation)] for allocation in allocations[1:]
    ):
        return None
    fields = [(allocation.category, allocation.label, allocation.num_bytes, uses[id(allocation)]) for allocation in allocations]
    weights = [
        (entry.name.removeprefix(start), tuple(places[id(tensor)] for tensor in entry.allocations), places[id(entry.source)],
         entry.gathered_bytes, entry.scratch_bytes)
        for entry in deferred
    ]  # fmt: skip
    return DeferredSnapshot(tuple(fields), tuple(weights))


def waiting_gradient(ledger: Ledger, op: Op, shape: Shape, share: Allocation | None, arriving: Allocation) -> Allocation:
    """The gradient of a product `op`'s result: `share`, this rank's positions, if others have theirs. In fp8 rounded first."""
    gradient = arriving.retain() if share is None else share
    if not op.in_fp8:
        return gradient
    rounded = ledger.take("temporary", "gradients of activations", waiting_bytes(op, shape, gradient))
    ledger.release(gradient)
    return rounded


def waiting_bytes(op: Op, shape: Shape, gradient: Allocation) -> int:
    """Bytes of `gradient` while it waits for the weight gradient of `op`: an element takes one byte in fp8."""
    return gradient.num_bytes // (shape.itemsize if op.in_fp8 else 1)


def weight_gradient_workspace(op: Op, shape: Shape) -> int:
    """Temporary bytes of a product in fp8 that W makes: on CUDA both factors transposed and padded, on the CPU both and the
    result in fp32. 0 for other products."""
    if op.product is None or not op.in_fp8:
        return 0
    m, n, k, _ = op.product
    if shape.device == "cpu":
        return shape.wide_itemsize * (m * n + m * k + n * k)
    return native_scratch_bytes(shape, n, m, k, lies=(False, False))
