"""Whole matrices out of the parts that ranks hold, one owner for each, and back: for updates that need all of a matrix.

    dp_shard   rows of a matrix over the ranks that share a copy of the state   -->  each rank the slices of some matrices
    tp         rows or columns of it over tensor-parallel ranks                 -->  each rank some whole matrices
               (experts: expert_tp; those that lie whole on ZeRO's ranks stay, of others rows are brought together first)
    work on the whole, then the same two exchanges backwards

A rank that holds 1/k of every matrix gets every k-th matrix whole: nothing is computed twice inside a copy of the state, and of
P elements that a rank holds it sends and receives P, twice (each exchange one `all_to_all_single`; `work.sharding.owners` says
whose). Copies of the state (dp_replicate, or ZeRO 0) each do all of it: the same bits, without a message. The alternative,
gathering every matrix everywhere, sends n times as much and computes everything n times; orthogonalising parts is another
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import Held, Share
from ultrascale.work.sharding.owners import Exchange, Span, exchanges, slice_spans


class WholeMatrices:
    """The exchanges for some weights of a rank; made once. All ranks of the groups make theirs of the same weights."""

    def __init__(self, share: Share, held: Sequence[Held]):
        found = exchanges([one.weight for one in held], share.layout, share.mesh.rank)
        self._stages = [_Stage(one, _group(share, held, one)) for one in found]

    def apply(self, parts: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """`work` on each whole matrix (of experts: on [X, m, n] of those here) of which `parts` are this rank's, in the order
        of the weights; this rank's parts of the results, of the same shapes. Collective."""
        here: dict[int, Tensor] = dict(enumerate(parts))
        for stage in self._stages:
            here = stage.to_owners(here)
        here = {number: work(matrix) if matrix.numel() else matrix for number, matrix in here.items()}
        for stage in reversed(self._stages):
            here = stage.to_parts(here)
        return [here[number] for number in range(len(parts))]


class _Stage:
    """One exchange there and back. Tensors it does not know pass by."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup):
        self.exchange, self.cuts = exchange, exchange.cuts
        self.group, self.rank, self.size = group, group.rank(), group.size()
        assert (self.rank, self.size) == (exchange.rank, len(next(iter(self.cuts.values())).spans))
        self._rest: dict[int, tuple[int, ...]] = {}
        """Shapes of parts."""

    def is_mine(self, number: int) -> bool:
        return self.exchange.is_mine(number)

    def to_owners(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        self._rest = {number: tuple(parts[number].shape) for number in self.cuts}
        sent = [[parts[n] for n, cut in self.cuts.items() if cut.owner == rank] for rank in range(self.size)]
        owned = [n for n in self.cuts if self.is_mine(n)]
        shapes = [[self._part_shape(n, rank) for n in owned] for rank in range(self.size)]
        received = self._exchange(sent, shapes, next(iter(parts.values())))
        wholes = {n: part for n, part in parts.items() if n not in self.cuts}
        for index, n in enumerate(owned):
            wholes[n] = self._assembled(n, [row[index] for row in received]).view(self.cuts[n].whole)
        return dict(sorted(wholes.items()))

    def to_parts(self, wholes: dict[int, Tensor]) -> dict[int, Tensor]:
        owned = [n for n in self.cuts if self.is_mine(n)]
        as_cut = {n: wholes[n].reshape(self.cuts[n].shape) for n in owned}
        sent = [[self._part(as_cut[n], n, rank) for n in owned] for rank in range(self.size)]
        del as_cut
        coming = [[n for n, cut in self.cuts.items() if cut.owner == rank] for rank in range(self.size)]
        shapes = [[self._rest[n] for n in some] for some in coming]
        like = next(iter(wholes.values()), None)
        received = self._exchange(sent, shapes, like if like is not None else self._like)
        parts = {n: whole for n, whole in wholes.items() if n not in self.cuts}
        for some, row in zip(coming, received, strict=True):
            parts |= dict(zip(some, row, strict=True))
        return dict(sorted(parts.items()))

    def _part(self, whole: Tensor, number: int, rank: int) -> Tensor:
        span = self.cuts[number].spans[rank]
        return whole.narrow(self.cuts[number].dim, span.first, span.length)

    def _part_shape(self, number: int, rank: int) -> tuple[int, ...]:
        shape, cut = list(self._rest[number]), self.cuts[number]
        shape[cut.dim] = cut.spans[rank].length
        return tuple(shape)

    def _assembled(self, number: int, parts: list[Tensor]) -> Tensor:
        cut = self.cuts[number]
        whole = parts[0].new_empty(cut.shape)
        for span, part in zip(cut.spans, parts, strict=True):
            whole.narrow(cut.dim, span.first, span.length).copy_(part)
        return whole

    def _exchange(self, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[list[Tensor]]:
        """Tensors that each rank sent to this one, of these shapes; `sent` goes to each rank, and is emptied."""
        self._like = like.new_empty(0)
        flat = torch.cat([like.new_empty(0), *(part.flatten() for some in sent for part in some)])
        sizes = [sum(part.numel() for part in some) for some in sent]
        sent.clear()  # copies of results that do not lie in one piece
        counts = [sum(prod(shape) for shape in some) for some in shapes]
        received = like.new_empty(sum(counts))
        with waiting("matrices gathered for the optimizer", self.group):
            dist.all_to_all_single(received, flat, counts, sizes, group=self.group)
        found = []
        for part, some in zip(received.split(counts), shapes, strict=True):
            pieces = part.split([prod(shape) for shape in some])
            found.append([piece.view(shape) for piece, shape in zip(pieces, some, strict=True)])
        return found


def spans_over(share: Share, one: Held, group: dist.ProcessGroup) -> tuple[Span, ...]:
    """The part that each rank of `group`, along tp or expert_tp, holds of the dimension of a weight that is sharded over it."""
    return slice_spans(one.weight, share.layout, dist.get_process_group_ranks(group))


def _group(share: Share, held: Sequence[Held], exchange: Exchange) -> dist.ProcessGroup:
    if exchange.axis in ("shard", "expert_shard"):
        parameter = held[next(iter(exchange.cuts))].parameter
        assert isinstance(parameter, DTensor)
        return parameter.device_mesh["dp_shard"].get_group()
    group = share.mesh.group("tp" if exchange.axis == "tp" else "expert_tp")
    assert group is not None
    return group
