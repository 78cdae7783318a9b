"""Gradients of weights, from the operation that makes them to the bucket that reduces them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from ultrascale.plan.ledger import Held, Ledger
from ultrascale.plan.sharding import Shards
from ultrascale.plan.stage_work import StageWork


class WeightGradients:
    """Those of a stage that are not with FSDP2 yet. `itemsize`: bytes of an element as autograd makes it."""

    def __init__(self, ledger: Ledger, work: StageWork, shards: Shards, itemsize: int):
        self.ledger, self.work, self.shards, self.itemsize = ledger, work, shards, itemsize
        self._arrived: Counter[str] = Counter()
        self._pending: dict[str, Held] = {}

    def state(self) -> Hashable:
        """Gradients of several uses, of which some have arrived."""
        return tuple(sorted(self._arrived.items()))

    def make(self, name: str) -> Held:
        """One use's."""
        _, weight = self.work.by_name[name]
        return self.ledger.take("temporary", "gradients of weights", weight.numel * self.itemsize)

    def arrive(self, name: str, gradient: Held) -> None:
        """A gradient reaches its weight; one of several uses waits for the rest first, and each sum is a tensor of its own."""
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
