"""Temporary memory of a Muon update: replays `train.optimizers.muon` for the matrix shards that a rank holds and the whole
matrices that it owns (updates).

    before    the rank's shard of each matrix in fp32, then in bf16, which stays to the end
    there     a send and a receive buffer of the exchange; the owner assembles whole matrices from the received one
    work      a result for each whole matrix; while one is computed, two more of its size and two squares of its shorter side
    back      results sharded along other dimensions than rows are copied first; then two buffers, shards are views of one
    after     one shard in fp32 at a time

`work.sharding.owners` assigns matrices to owners; a few large matrices do not divide evenly over many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ultrascale.description.architecture.weights import Weight
from ultrascale.description.layout import DTYPE_BYTES, Layout
from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.work.sharding.owners import Exchange, Sharding, exchanges, part_shape


@dataclass
class _Matrix:
    """A shard, a whole matrix or a result: its memory, shape and whether it is contiguous."""

    allocation: Allocation
    shape: tuple[int, ...]
    is_contiguous: bool = True


def muon_update_bytes(matrices: Sequence[Weight], layout: Layout, rank: int) -> int:
    """Peak bytes of an update of `matrices`, besides weights, gradients and momenta."""
    if not matrices:
        return 0
    return _Update(layout).play([part_shape(weight, layout, rank) for weight in matrices], exchanges(matrices, layout, rank))


class _Update:
    """Ledger of one update."""

    def __init__(self, layout: Layout):
        self.ledger = Ledger()
        self.master_bytes = DTYPE_BYTES[layout.master_dtype]
        self.itemsize = DTYPE_BYTES["fp64" if layout.master_dtype == "fp64" else "bf16"]

    def play(self, shapes: Sequence[tuple[int, ...]], stages: Sequence[Exchange]) -> int:
        """Peak bytes of the update, from gradient shards of these shapes to the last parameter."""
        parts = self._parts(shapes)
        live = dict(enumerate(parts))
        self._retain(live)
        for stage in stages:
            live = self._moved(live, self._gather_to_owners(live, stage))
        live = self._moved(live, {number: self._orthogonalised(tensor) for number, tensor in live.items()})
        for stage in reversed(stages):
            live = self._moved(live, self._scatter_to_shards(live, stage))
        self._touch(self.master_bytes * max(map(prod, shapes)))
        self.ledger.mark("end", 0)
        return self.ledger.peaks[0].total

    def _parts(self, shapes: Sequence[tuple[int, ...]]) -> list[_Matrix]:
        """Shards of the updates G + momentum B; a variable keeps the last one in the master dtype."""
        parts, last = [], None
        for shape in shapes:
            momentum = self._take(prod(shape), self.master_bytes)
            if last is not None:
                self.ledger.release(last)
            last = self._take(prod(shape), self.master_bytes)
            self.ledger.release(momentum)
            is_same = self.itemsize == self.master_bytes
            parts.append(_Matrix(last.retain() if is_same else self._take(prod(shape)), shape))
        return parts

    def _gather_to_owners(self, live: dict[int, _Matrix], stage: Exchange) -> dict[int, _Matrix]:
        """Whole matrices that this rank owns, and tensors that are not in the exchange."""
        received = self._exchange(stage, to_owners=True)
        wholes = {n: tensor for n, tensor in live.items() if n not in stage.shardings}
        self._retain(wholes)
        owned = {n: sharding.full_shape for n, sharding in stage.shardings.items() if stage.is_owner(n)}
        wholes |= {n: _Matrix(self._take(prod(shape)), shape) for n, shape in owned.items()}
        self.ledger.release(received)
        return dict(sorted(wholes.items()))

    def _scatter_to_shards(self, live: dict[int, _Matrix], stage: Exchange) -> dict[int, _Matrix]:
        """This rank's shards, as views of the received buffer, and tensors that are not in the exchange."""
        copied = sum(_copied(live[n], sharding) for n, sharding in stage.shardings.items() if stage.is_owner(n))
        received = self._exchange(stage, to_owners=False, copied=copied)
        parts = {n: tensor for n, tensor in live.items() if n not in stage.shardings}
        self._retain(parts)
        for number, sharding in stage.shardings.items():
            shape = tuple(
                sharding.spans[stage.rank].length if dim == sharding.dim else size for dim, size in enumerate(sharding.shape)
            )
            parts[number] = _Matrix(received.retain(), shape)
        self.ledger.release(received)
        return dict(sorted(parts.items()))

    def _exchange(self, stage: Exchange, *, to_owners: bool, copied: int = 0) -> Allocation:
        """Buffer received, after the sent buffer is freed. `copied`: elements that are not contiguous and are copied before
        the send."""
        first, second = stage.sent_elements if to_owners else stage.sent_elements[::-1]
        copies = self._take(copied)
        sent = self._take(first)
        self.ledger.release(copies)
        received = self._take(second)
        self.ledger.release(sent)
        return received

    def _orthogonalised(self, tensor: _Matrix) -> _Matrix:
        """Result of `train.optimizers.muon.orthogonalise`: contiguous unless the matrix has more rows than columns (then it
        is a transposed view)."""
        if not prod(tensor.shape):
            return _Matrix(tensor.allocation.retain(), tensor.shape)
        *several, rows, columns = tensor.shape
        square = prod(several) * min(rows, columns) ** 2
        result = self._take(prod(tensor.shape))
        self._touch(self.itemsize * (prod(tensor.shape) + 2 * square))
        return _Matrix(result, tensor.shape, is_contiguous=rows <= columns)

    def _moved(self, before: dict[int, _Matrix], after: dict[int, _Matrix]) -> dict[int, _Matrix]:
        for tensor in before.values():
            self.ledger.release(tensor.allocation)
        return after

    def _retain(self, tensors: dict[int, _Matrix]) -> None:
        for tensor in tensors.values():
            tensor.allocation.retain()

    def _take(self, elements: int, itemsize: int | None = None) -> Allocation:
        return self.ledger.take("temporary", "matrices of an update", elements * (itemsize or self.itemsize))

    def _touch(self, num_bytes: int) -> None:
        self.ledger.touch("temporary", "matrices of an update", num_bytes)


def _copied(whole: _Matrix, sharding: Sharding) -> int:
    """Elements of the shards of a result that are not contiguous in it, and are copied before the send."""
    if whole.is_contiguous and prod(whole.shape[: sharding.dim]) == 1:
        return 0
    pieces = [
        rank
        for rank, span in enumerate(sharding.spans)
        if not whole.is_contiguous or span.length < sharding.shape[sharding.dim]
    ]
    return sum(sharding.numel(rank) for rank in pieces)
