"""Owners of whole matrices, for updates that need a whole matrix (Muon), and the communication for it
(`parallel.data.gathered_matrices`).

    shard          rows of a matrix over the ranks that share one copy of the state  -->  each rank gets slices of some matrices
    expert_shard   rows of experts, if ZeRO does not leave them whole                -->  each rank gets some weights' experts
    tp, expert_tp  rows or columns over tensor-parallel ranks                        -->  each rank gets some whole matrices

Used by both trainer and planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ultrascale.description.architecture.weights import Weight
from ultrascale.description.layout import Axis, Layout
from ultrascale.work.sharding.places import Coordinates, shard_of, zero_shape

NEWTON_SCHULZ_STEPS = 5
"""Steps of the iteration that orthogonalises a matrix (Jordan et al. 2024)."""


@dataclass(frozen=True)
class Span:
    """The part of one dimension that a rank holds."""

    first: int
    length: int


@dataclass(frozen=True)
class Sharding:
    """Division of a tensor among the ranks of a group, and the rank that owns all of it."""

    dim: int
    spans: tuple[Span, ...]
    """Span of each rank of the group; several ranks may hold the same."""
    shape: tuple[int, ...]
    """Shape of the tensor that the group holds together."""
    cost: int
    """Cost of the update of the whole tensor, relative to others."""
    full_shape: tuple[int, ...]
    """Shape in which its owner updates it: experts as [X, F, D], even if their rows are sharded."""
    owner: int = 0

    def numel(self, rank: int) -> int:
        """Number of elements that a rank holds."""
        return prod(self.shape) // self.shape[self.dim] * self.spans[rank].length


class Exchange(NamedTuple):
    """Exchange of parts over the groups of an axis: to the owners, and later, with the results, back."""

    axis: Axis
    rank: int
    """Rank in the group."""
    shardings: dict[int, Sharding]
    """Sharding of each weight, by its number."""

    def is_owner(self, number: int) -> bool:
        return self.shardings[number].owner == self.rank

    @property
    def sent_elements(self) -> tuple[int, int]:
        """Elements that the rank sends to owners, its own part included, and elements that it sends back."""
        there = sum(sharding.numel(self.rank) for sharding in self.shardings.values())
        back = sum(
            sharding.numel(rank)
            for n, sharding in self.shardings.items()
            if self.is_owner(n)
            for rank in range(len(sharding.spans))
        )
        return there, back


def exchanges(some: Sequence[Weight], layout: Layout, rank: int) -> list[Exchange]:
    """Exchanges that bring `some` matrices of a rank to their owners, one after the other; empty if all are whole."""
    numbers = range(len(some))
    stages: list[Exchange] = []
    shardings = {n: _zero_sharding(some[n], layout, rank) for n in numbers if not _lies_whole(some[n], layout, rank)}
    shards: tuple[tuple[Axis, bool], ...] = (("shard", False), ("expert_shard", True))
    for axis, wanted in shards:
        if axis_shardings := {n: zero_sharding for n, zero_sharding in shardings.items() if some[n].is_expert == wanted}:
            stages.append(_exchange(axis, axis_shardings, some, layout, rank))
    # The slices that this rank owns now are joined with those that its tp peers own of the same matrices.
    owned = [n for n in numbers if n not in shardings or any(n in stage.shardings and stage.is_owner(n) for stage in stages)]
    axes: tuple[tuple[Axis, bool], ...] = (("tp", False), ("expert_tp", True))
    for axis, wanted in axes:
        sliced = [n for n in owned if some[n].is_expert == wanted and some[n].tp_dim is not None]
        if sliced and layout.group(axis)[0] > 1:
            stages.append(_exchange(axis, {n: _tp_sharding(some[n], axis, layout, rank) for n in sliced}, some, layout, rank))
    return stages


def owned_shapes(some: Sequence[Weight], layout: Layout, rank: int) -> list[tuple[int, ...]]:
    """Shapes of the whole matrices that a rank updates; of experts, [X, m, n] of the local ones."""
    stages = exchanges(some, layout, rank)
    owned = [n for n in range(len(some)) if all(n not in stage.shardings or stage.is_owner(n) for stage in stages)]
    return [_whole_shape(some[n], layout, rank) for n in owned]


def part_shape(weight: Weight, layout: Layout, rank: int) -> tuple[int, ...]:
    """Shape of a rank's part of a matrix."""
    coordinates = Coordinates.of(layout, rank)
    ranks = _sharers(weight, layout, rank)
    rows, *columns = zero_shape(shard_of(weight, layout, coordinates).shape, len(ranks))
    return (chunk(rows, len(ranks), ranks.index(rank)).length, *columns)


def orthogonalising_flops(shape: Sequence[int]) -> int:
    """FLOPs to orthogonalise matrices [..., m, n]: each step computes X X^T, its square, and the product of both with X
    (`train.optimizers.muon`)."""
    *several, m, n = shape
    short, long = min(m, n), max(m, n)
    return NEWTON_SCHULZ_STEPS * 2 * prod(several) * (2 * short * short * long + short**3)


def members(layout: Layout, axis: Axis, rank: int) -> range:
    """Ranks of the group along `axis` that contains `rank`."""
    size, stride = layout.group(axis)
    first = rank - rank // stride % size * stride
    return range(first, first + size * stride, stride)


def chunk(rows: int, ranks: int, rank: int) -> Span:
    """Span of a rank under FSDP2's sharding: equal parts, the last ones shorter."""
    size = -(-rows // ranks)
    first = min(rank * size, rows)
    return Span(first, min(size, rows - first))


def slice_spans(weight: Weight, layout: Layout, ranks: Sequence[int]) -> tuple[Span, ...]:
    """Span of the sharded dimension of a weight that each of `ranks`, along tp or expert_tp, holds."""
    dim = weight.tp_dim
    assert dim is not None
    places = [shard_of(weight, layout, Coordinates.of(layout, rank)) for rank in ranks]
    return tuple(Span(local.offsets[dim], local.shape[dim]) for local in places)


def _exchange(axis: Axis, shardings: dict[int, Sharding], some: Sequence[Weight], layout: Layout, rank: int) -> Exchange:
    """Assign an owner to each matrix, the costliest first to the rank with the least work."""
    ranks, load = members(layout, axis, rank), [0] * layout.group(axis)[0]
    owned: dict[int, Sharding] = {}
    for number in sorted(shardings, key=lambda n: (-shardings[n].cost, some[n].name)):
        owner = load.index(min(load))
        owned[number] = replace(shardings[number], owner=owner)
        load[owner] += shardings[number].cost
    return Exchange(axis, ranks.index(rank), dict(sorted(owned.items())))


def _sharers(weight: Weight, layout: Layout, rank: int) -> range:
    """Ranks over which ZeRO shards the part of a weight that `rank` has."""
    return members(layout, "expert_shard" if weight.is_expert else "shard", rank)


def _lies_whole(weight: Weight, layout: Layout, rank: int) -> bool:
    """True if ZeRO leaves every matrix of a weight on one rank."""
    ranks, shape = len(_sharers(weight, layout, rank)), shard_of(weight, layout, Coordinates.of(layout, rank)).shape
    return ranks == 1 or (weight.is_expert and zero_shape(shape, ranks) == shape)


def _zero_sharding(weight: Weight, layout: Layout, rank: int) -> Sharding:
    whole, ranks = shard_of(weight, layout, Coordinates.of(layout, rank)).shape, len(_sharers(weight, layout, rank))
    shape = zero_shape(whole, ranks)
    return Sharding(0, tuple(chunk(shape[0], ranks, member) for member in range(ranks)), shape, prod(weight.shape), whole)


def _tp_sharding(weight: Weight, axis: Axis, layout: Layout, rank: int) -> Sharding:
    dim, shape = weight.tp_dim, _whole_shape(weight, layout, rank)
    assert dim is not None
    return Sharding(dim, slice_spans(weight, layout, members(layout, axis, rank)), shape, prod(weight.shape), shape)


def _whole_shape(weight: Weight, layout: Layout, rank: int) -> tuple[int, ...]:
    """Shape of a whole matrix; for experts, of as many as the rank has, before or after rows are exchanged."""
    if not weight.is_expert:
        return weight.shape
    if _lies_whole(weight, layout, rank):
        return (part_shape(weight, layout, rank)[0], *weight.shape[1:])
    return (shard_of(weight, layout, Coordinates.of(layout, rank)).shape[0], *weight.shape[1:])
