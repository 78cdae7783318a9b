"""Maps groups of ranks to the parallelism axes of a layout."""

from __future__ import annotations

from typing import NamedTuple

from ultrascale.description.layout import Layout

AXES = ("tp", "cp", "dp", "dp x cp", "shard", "replicate", "ep", "expert_tp", "expert_dp", "pp", "all")

OF_EXPERTS = ("ep", "expert_tp", "expert_dp")


class RankGroup(NamedTuple):
    """A group of ranks, `stride` apart."""

    axis: str
    size: int
    stride: int


def group_of(layout: Layout, ranks: list[int]) -> RankGroup:
    """Group of `ranks`, with the axis that it belongs to."""
    size, stride = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return RankGroup(axis_of(layout, size, stride), size, stride)


def axis_of(layout: Layout, size: int, stride: int) -> str:
    """Axis of groups of `size` ranks that are `stride` apart; the first of `AXES` if several match."""
    named = [axis for axis in AXES if axis not in OF_EXPERTS or layout.ep * layout.expert_tp > 1]
    if stride == 1 and size < layout.tp:  # tp ranks that share a key/value head
        return "tp copies"
    return next((axis for axis in named if extent(layout, axis) == (size, stride)), f"{size} ranks, every {stride}.")


def extent(layout: Layout, axis: str) -> tuple[int, int]:
    """(size, stride) of the groups of an axis."""
    plane = layout.tp * layout.cp
    if axis == "dp":
        return layout.dp, plane
    if axis == "dp x cp":
        return layout.group("dp")
    if axis == "pp":
        return layout.pp, plane * layout.dp
    if axis == "all":
        return layout.world_size, 1
    return layout.group(axis)  # pyright: ignore[reportArgumentType]


def crosses_nodes(rank: int, size: int, stride: int, per_node: int) -> bool:
    """True if the group of `rank` spans several nodes, which ranks fill in order, `per_node` each."""
    first = rank - rank // stride % size * stride
    return first // per_node != (first + (size - 1) * stride) // per_node
