"""Gathers sharded matrices onto one owner each, and scatters the results: for updates that need whole matrices (Muon).

    dp_shard   rows of a matrix over the ranks that share one copy of the state   -->  each rank gets slices of some matrices
    tp         rows or columns of it over tensor-parallel ranks                    -->  each rank gets some whole matrices
               (experts: expert_tp; experts that are whole on a ZeRO rank stay, sharded ones are gathered by rows first)
    compute on the whole matrix, then the same two exchanges in reverse

A rank that holds 1/k of every matrix gets every k-th matrix whole: nothing is computed twice within a replica, and a rank that
holds P elements sends and receives P, twice (each exchange is one `all_to_all_single`; `work.sharding.owners` assigns owners).
Replicas (dp_replicate, or ZeRO 0) each do all of it, with the same bits and no communication. The alternative, all-gathering
every matrix everywhere, sends n times as much and computes everything n times; orthogonalising shards separately is another
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
from ultrascale.parallel.share import LocalParameter, Share
from ultrascale.work.sharding.owners import Exchange, Span, exchanges, slice_spans


class GatheredMatrices:
    """Exchanges for a set of weights of a rank; built once. All ranks of the groups build theirs for the same weights."""

    def __init__(self, share: Share, shards: Sequence[LocalParameter]):
        planned = exchanges([shard.weight for shard in shards], share.layout, share.mesh.rank)
        self._stages = [_ExchangeStage(exchange, _group(share, shards, exchange)) for exchange in planned]

    def apply(self, parts: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Apply `work` to each whole matrix (experts: to [X, m, n] of the local experts). `parts` are this rank's shards, in
        the order of the weights; returns this rank's shards of the results, of the same shapes. Collective."""
        tensors: dict[int, Tensor] = dict(enumerate(parts))
        for stage in self._stages:
            tensors = stage.gather_to_owners(tensors)
        tensors = {number: work(matrix) if matrix.numel() else matrix for number, matrix in tensors.items()}
        for stage in reversed(self._stages):
            tensors = stage.scatter_to_shards(tensors)
        return [tensors[number] for number in range(len(parts))]


class _ExchangeStage:
    """One exchange and its reverse. Tensors it does not know pass through unchanged."""

    def __init__(self, exchange: Exchange, group: dist.ProcessGroup):
        self.exchange, self.shardings = exchange, exchange.shardings
        self.group, self.rank, self.size = group, group.rank(), group.size()
        assert (self.rank, self.size) == (exchange.rank, len(next(iter(self.shardings.values())).spans))
        self._rest: dict[int, tuple[int, ...]] = {}
        """Shapes of the parts."""

    def is_owner(self, number: int) -> bool:
        return self.exchange.is_owner(number)

    def gather_to_owners(self, parts: dict[int, Tensor]) -> dict[int, Tensor]:
        self._rest = {number: tuple(parts[number].shape) for number in self.shardings}
        sent = [[parts[n] for n, sharding in self.shardings.items() if sharding.owner == rank] for rank in range(self.size)]
        owned = [n for n in self.shardings if self.is_owner(n)]
        shapes = [[self._part_shape(n, rank) for n in owned] for rank in range(self.size)]
        received = self._exchange(sent, shapes, next(iter(parts.values())))
        wholes = {n: part for n, part in parts.items() if n not in self.shardings}
        for index, n in enumerate(owned):
            wholes[n] = self._assembled(n, [row[index] for row in received]).view(self.shardings[n].full_shape)
        return dict(sorted(wholes.items()))

    def scatter_to_shards(self, wholes: dict[int, Tensor]) -> dict[int, Tensor]:
        owned = [n for n in self.shardings if self.is_owner(n)]
        as_sharded = {n: wholes[n].reshape(self.shardings[n].shape) for n in owned}
        sent = [[self._part(as_sharded[n], n, rank) for n in owned] for rank in range(self.size)]
        del as_sharded
        coming = [[n for n, sharding in self.shardings.items() if sharding.owner == rank] for rank in range(self.size)]
        shapes = [[self._rest[n] for n in some] for some in coming]
        like = next(iter(wholes.values()), None)
        received = self._exchange(sent, shapes, like if like is not None else self._like)
        parts = {n: whole for n, whole in wholes.items() if n not in self.shardings}
        for some, row in zip(coming, received, strict=True):
            parts |= dict(zip(some, row, strict=True))
        return dict(sorted(parts.items()))

    def _part(self, whole: Tensor, number: int, rank: int) -> Tensor:
        span = self.shardings[number].spans[rank]
        return whole.narrow(self.shardings[number].dim, span.first, span.length)

    def _part_shape(self, number: int, rank: int) -> tuple[int, ...]:
        shape, sharding = list(self._rest[number]), self.shardings[number]
        shape[sharding.dim] = sharding.spans[rank].length
        return tuple(shape)

    def _assembled(self, number: int, parts: list[Tensor]) -> Tensor:
        sharding = self.shardings[number]
        whole = parts[0].new_empty(sharding.shape)
        for span, part in zip(sharding.spans, parts, strict=True):
            whole.narrow(sharding.dim, span.first, span.length).copy_(part)
        return whole

    def _exchange(self, sent: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor) -> list[list[Tensor]]:
        """Send `sent[rank]` to each rank (and empty it); returns the tensors received from each rank, of these `shapes`."""
        self._like = like.new_empty(0)
        flat = torch.cat([like.new_empty(0), *(part.flatten() for some in sent for part in some)])
        sizes = [sum(part.numel() for part in some) for some in sent]
        sent.clear()  # frees copies of non-contiguous results
        counts = [sum(prod(shape) for shape in some) for some in shapes]
        received = like.new_empty(sum(counts))
        with waiting("matrices gathered for the optimizer", self.group):
            dist.all_to_all_single(received, flat, counts, sizes, group=self.group)
        by_rank = []
        for part, some in zip(received.split(counts), shapes, strict=True):
            pieces = part.split([prod(shape) for shape in some])
            by_rank.append([piece.view(shape) for piece, shape in zip(pieces, some, strict=True)])
        return by_rank


def spans_over(share: Share, shard: LocalParameter, group: dist.ProcessGroup) -> tuple[Span, ...]:
    """Span of the sharded dimension of a weight that each rank of `group` (tp or expert_tp) holds."""
    return slice_spans(shard.weight, share.layout, dist.get_process_group_ranks(group))


def _group(share: Share, shards: Sequence[LocalParameter], exchange: Exchange) -> dist.ProcessGroup:
    if exchange.axis in ("shard", "expert_shard"):
        parameter = shards[next(iter(exchange.shardings))].parameter
        assert isinstance(parameter, DTensor)
        return parameter.device_mesh["dp_shard"].get_group()
    group = share.mesh.group("tp" if exchange.axis == "tp" else "expert_tp")
    assert group is not None
    return group
