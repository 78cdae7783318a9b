"""Gradients of weights, from the operation that makes them to the bucket that reduces them.

Also the tensors kept between the two halves I and W of a split backward pass: each linear layer's input and output gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.plan.memory.sharding import Shards
from ultrascale.plan.memory.stage_work import StageWork
from ultrascale.schedules.actions import Action
from ultrascale.work.op_builders import native_scratch_bytes
from ultrascale.work.ops import Op, Shape


class StageGradients:
    """Gradients of a stage's weights before FSDP2 gets them. `itemsize`: bytes of an element in autograd's dtype."""

    def __init__(self, ledger: Ledger, work: StageWork, shards: Shards, itemsize: int):
        self.ledger, self.work, self.shards, self.itemsize = ledger, work, shards, itemsize
        self._arrived: Counter[str] = Counter()
        self._pending: dict[str, Allocation] = {}

    def state(self) -> Hashable:
        """Weights used several times in a pass, with the number of their gradients that have arrived."""
        return tuple(sorted(self._arrived.items()))

    def make(self, name: str) -> Allocation:
        """Allocate the gradient of one use of a weight."""
        _, weight = self.work.by_name[name]
        return self.ledger.take("temporary", "gradients of weights", weight.numel * self.itemsize)

    def arrive(self, name: str, gradient: Allocation) -> None:
        """Pass a gradient on to its bucket. A weight with several uses waits for all; each partial sum is a new tensor."""
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
    """A weight whose gradient is deferred to W, with the tensors that W needs."""

    name: str
    allocations: tuple[Allocation, ...]
    source: Allocation
    """The GEMM's input or output gradient, whichever tp shards by sequence; several GEMMs may share it."""
    gathered_bytes: int
    """Bytes of `source` over all ranks' positions, which W all-gathers over tp; 0 where this rank has it whole."""
    scratch_bytes: int
    """Bytes of temporary memory that the GEMM needs in addition in W."""


@dataclass
class RecordedBlock:
    """A block whose forward pass was applied from a record: the ledger counts its bytes."""

    block_input: Allocation
    """Made again for passes without a record."""


@dataclass
class WaitingBlock:
    """A block between I and W."""

    layer: int
    action: Action
    """Its I."""
    gradient: Allocation
    """Gradient of its result, before I."""
    deferred: list[Deferred] = field(default_factory=list)
    recorded: RecordedBlock | None = None
    """Its tape, if I was applied from a record and left no tensors."""


Deferred = DeferredGradient | WaitingBlock


def waiting_gradient(ledger: Ledger, op: Op, shape: Shape, share: Allocation | None, arriving: Allocation) -> Allocation:
    """Output gradient of GEMM `op` that is kept for W: `share` (this rank's positions) if tp shards it; rounded if in fp8."""
    gradient = arriving.retain() if share is None else share
    if not op.in_fp8:
        return gradient
    rounded = ledger.take("temporary", "gradients of activations", waiting_bytes(op, shape, gradient))
    ledger.release(gradient)
    return rounded


def waiting_bytes(op: Op, shape: Shape, gradient: Allocation) -> int:
    """Bytes of `gradient` while kept for the deferred weight gradient of `op`: one byte an element in fp8."""
    return gradient.num_bytes // (shape.itemsize if op.in_fp8 else 1)


def weight_gradient_workspace(op: Op, shape: Shape) -> int:
    """Temporary bytes of an fp8 weight-gradient GEMM in W: on CUDA both factors transposed and padded, on the CPU both factors
    and the result in fp32. 0 for other operations."""
    if op.product is None or not op.in_fp8:
        return 0
    m, n, k, _ = op.product
    if shape.device == "cpu":
        return shape.wide_itemsize * (m * n + m * k + n * k)
    return native_scratch_bytes(shape, n, m, k, lies=(False, False))
