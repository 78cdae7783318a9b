"""Temporary memory of an update of Muon: `train.optimizers.muon` replayed with the matrices that a rank holds and those that
it owns.

    before    of each matrix the rank's part in fp32, then in bf16, which stays to the end
    there     one buffer to the owners and one from them, of which whole matrices are put together
    work      a result beside each whole matrix, and while one is worked on two of it and two of its shorter side's square
    back      results cut along other dimensions than rows are copied first; then the two buffers, of which parts are views
    after     one part in fp32 at a time

`work.sharding.owners` says who owns what; few large matrices over many ranks are not shared out evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ultrascale.description.architecture.weights import Weight
from ultrascale.description.layout import DTYPE_BYTES, Layout
from ultrascale.plan.memory.ledger import Held, Ledger
from ultrascale.work.sharding.owners import Cut, Exchange, exchanges, part_shape


@dataclass
class _Tensor:
    """A part, a whole matrix or a result: its memory, and whether its rows lie one behind the other."""

    held: Held
    shape: tuple[int, ...]
    is_contiguous: bool = True


def muon_update_bytes(some: Sequence[Weight], layout: Layout, rank: int) -> int:
    """The most that an update of `some` matrices needs at once, beside weights, gradients and momenta."""
    if not some:
        return 0
    return _Update(layout).play([part_shape(weight, layout, rank) for weight in some], exchanges(some, layout, rank))


class _Update:
    """The books of one update."""

    def __init__(self, layout: Layout):
        self.ledger = Ledger()
        self.master_bytes = DTYPE_BYTES[layout.master_dtype]
        self.itemsize = DTYPE_BYTES["fp64" if layout.master_dtype == "fp64" else "bf16"]

    def play(self, shapes: Sequence[tuple[int, ...]], stages: Sequence[Exchange]) -> int:
        """Peak bytes of the update, from the gradients of parts of these shapes to the last parameter."""
        parts = self._parts(shapes)
        here = dict(enumerate(parts))
        self._hold(here)
        for stage in stages:
            here = self._moved(here, self._to_owners(here, stage))
        here = self._moved(here, {number: self._worked_on(one) for number, one in here.items()})
        for stage in reversed(stages):
            here = self._moved(here, self._to_parts(here, stage))
        self._touch(self.master_bytes * max(map(prod, shapes)))
        self.ledger.mark("end", 0)
        return self.ledger.peaks[0].total

    def _parts(self, shapes: Sequence[tuple[int, ...]]) -> list[_Tensor]:
        """Parts of the updates G + momentum B; a variable keeps the last wide one."""
        parts, last = [], None
        for shape in shapes:
            momentum = self._take(prod(shape), self.master_bytes)
            if last is not None:
                self.ledger.drop(last)
            last = self._take(prod(shape), self.master_bytes)
            self.ledger.drop(momentum)
            is_same = self.itemsize == self.master_bytes
            parts.append(_Tensor(last.hold() if is_same else self._take(prod(shape)), shape))
        return parts

    def _to_owners(self, here: dict[int, _Tensor], stage: Exchange) -> dict[int, _Tensor]:
        """Whole matrices of this rank's, and what the exchange does not know."""
        received = self._exchange(stage, there=True)
        wholes = {n: one for n, one in here.items() if n not in stage.cuts}
        self._hold(wholes)
        owned = {n: cut.whole for n, cut in stage.cuts.items() if stage.is_mine(n)}
        wholes |= {n: _Tensor(self._take(prod(shape)), shape) for n, shape in owned.items()}
        self.ledger.drop(received)
        return dict(sorted(wholes.items()))

    def _to_parts(self, here: dict[int, _Tensor], stage: Exchange) -> dict[int, _Tensor]:
        """Views of what came back."""
        copied = sum(_copied(here[n], cut) for n, cut in stage.cuts.items() if stage.is_mine(n))
        received = self._exchange(stage, there=False, copied=copied)
        parts = {n: one for n, one in here.items() if n not in stage.cuts}
        self._hold(parts)
        for number, cut in stage.cuts.items():
            shape = tuple(cut.spans[stage.rank].length if dim == cut.dim else size for dim, size in enumerate(cut.shape))
            parts[number] = _Tensor(received.hold(), shape)
        self.ledger.drop(received)
        return dict(sorted(parts.items()))

    def _exchange(self, stage: Exchange, *, there: bool, copied: int = 0) -> Held:
        """Buffer received, after the sent buffer is freed. `copied`: elements that are not contiguous and are copied before
        the send."""
        first, second = stage.sent_elements if there else stage.sent_elements[::-1]
        copies = self._take(copied)
        sent = self._take(first)
        self.ledger.drop(copies)
        received = self._take(second)
        self.ledger.drop(sent)
        return received

    def _worked_on(self, one: _Tensor) -> _Tensor:
        """As `train.optimizers.muon.orthogonalise`, whose result is turned like a matrix with more rows than
        columns."""
        if not prod(one.shape):
            return _Tensor(one.held.hold(), one.shape)
        *several, rows, columns = one.shape
        square = prod(several) * min(rows, columns) ** 2
        result = self._take(prod(one.shape))
        self._touch(self.itemsize * (prod(one.shape) + 2 * square))
        return _Tensor(result, one.shape, is_contiguous=rows <= columns)

    def _moved(self, before: dict[int, _Tensor], after: dict[int, _Tensor]) -> dict[int, _Tensor]:
        for one in before.values():
            self.ledger.drop(one.held)
        return after

    def _hold(self, some: dict[int, _Tensor]) -> None:
        for one in some.values():
            one.held.hold()

    def _take(self, elements: int, itemsize: int | None = None) -> Held:
        return self.ledger.take("temporary", "matrices of an update", elements * (itemsize or self.itemsize))

    def _touch(self, num_bytes: int) -> None:
        self.ledger.touch("temporary", "matrices of an update", num_bytes)


def _copied(whole: _Tensor, cut: Cut) -> int:
    """Elements of the parts of a result that are no piece of its memory."""
    if whole.is_contiguous and prod(whole.shape[: cut.dim]) == 1:
        return 0
    pieces = [rank for rank, span in enumerate(cut.spans) if not whole.is_contiguous or span.length < cut.shape[cut.dim]]
    return sum(cut.numel(rank) for rank in pieces)
