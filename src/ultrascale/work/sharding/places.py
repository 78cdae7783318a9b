"""Coordinates of each rank, and the shard of each weight that it holds before data parallelism shards it further.

    weight                     sharding                      ranks that hold the same part
    column or row parallel     along `tp_dim`, over tp       none; for keys and values tp / heads neighbours, if tp is more
    other                      none                          all of tp
    experts                    dim 0 over ep, and `tp_dim`   none except expert data parallelism
                               over expert_tp

ZeRO shards dim 0 of that part in equal parts (`work.sharding.owners.chunk`); of stacked experts, whole ones or rows of them
(`zero_shape`).

Every rank that holds a part computes with it on its own tokens or heads, so that its gradient is a partial sum. One exception:
without sequence parallelism all tp ranks compute the same outside the sharded GEMMs, and each has the whole sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ultrascale.description.architecture.weights import Weight
from ultrascale.description.layout import Layout

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
"""Norms that are not sharded, but that each tp rank applies only to its own heads."""


class Coordinates(NamedTuple):
    """A rank's index along each axis, from 0."""

    pp: int
    dp: int
    cp: int
    tp: int
    expert_dp: int
    ep: int
    expert_tp: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Coordinates:
        """Coordinates of `rank` = ((pp_i * dp + dp_i) * cp + cp_i) * tp + tp_i. Raises ValueError if the layout has no such
        rank."""
        if not 0 <= rank < layout.world_size:
            raise ValueError(f"a layout of {layout.world_size} ranks has no rank {rank}")
        pp, in_stage = divmod(rank, layout.dp * layout.cp * layout.tp)
        dp, in_replica = divmod(in_stage, layout.cp * layout.tp)
        expert_dp, in_experts = divmod(in_stage, layout.ep * layout.expert_tp)
        return cls(pp, dp, *divmod(in_replica, layout.tp), expert_dp, *divmod(in_experts, layout.expert_tp))

    @property
    def leads_replica(self) -> bool:
        """True for the first of the tp ranks that see the same tokens: values that all of them have are counted once."""
        return self.tp == 0


class WeightShard(NamedTuple):
    """A rank's shard of a weight."""

    offsets: tuple[int, ...]
    """Offsets of its first element in the whole weight."""
    shape: tuple[int, ...]
    num_tp_copies: int = 1
    """Number of neighbours along tp (for experts: along expert_tp) that hold the same part."""
    tp_copy: int = 0
    """Index of this rank among those neighbours."""
    is_partial: bool = False
    """True if the gradient is the sum of those neighbours' partial gradients; otherwise each computes all of it."""


def shard_of(weight: Weight, layout: Layout, coordinates: Coordinates) -> WeightShard:
    """Shard of `weight` that the rank at `coordinates` holds before data parallelism."""
    offsets, shape = [0] * len(weight.shape), list(weight.shape)

    def split(dim: int, ranks: int, rank: int) -> None:
        offsets[dim], shape[dim] = even_part(weight.shape[dim], ranks, rank)

    if weight.is_expert:
        split(0, layout.ep, coordinates.ep)
        if weight.tp_dim is not None:
            split(weight.tp_dim, layout.expert_tp, coordinates.expert_tp)
            return WeightShard(tuple(offsets), tuple(shape))
        return WeightShard(
            tuple(offsets), tuple(shape), layout.expert_tp, coordinates.expert_tp, is_partial=layout.expert_tp > 1
        )
    parts = 1 if weight.tp_dim is None else min(layout.tp, weight.max_tp_shards or layout.tp)
    num_tp_copies = layout.tp // parts
    if weight.tp_dim is not None:
        split(weight.tp_dim, parts, coordinates.tp // num_tp_copies)
    differs = weight.tp_dim is not None or layout.sequence_parallel or weight.name.endswith(HEAD_NORMS)
    return WeightShard(
        tuple(offsets), tuple(shape), num_tp_copies, coordinates.tp % num_tp_copies, is_partial=num_tp_copies > 1 and differs
    )


def zero_shape(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape in which ZeRO shards a part of a weight along dim 0 over `ranks`: its own; but for stacked experts [X, F, D] whose
    number the ranks do not divide, [X F, D], the rows of all of them.

    FSDP2 pads the last ranks' parts of dim 0, which would be whole experts: 8 experts over 64 ranks would take the memory of
    64.
    """
    experts, *matrix = shape
    return (experts * matrix[0], matrix[1]) if len(shape) == 3 and experts % ranks else shape


def row_boxes(
    shape: tuple[int, ...], stored_shape: tuple[int, ...], first: int, length: int
) -> Iterator[tuple[slice, WeightShard]]:
    """Boxes of a part of `shape` covered by `length` entries of dim 0 from `first` on, where it is sharded as `stored_shape`
    (`zero_shape`). Each comes with its entries, counted from `first`. There is one box, unless the entries are rows of several
    experts.

    Raises ValueError if `stored_shape` is not a form of `shape`.
    """
    if stored_shape == shape:
        yield slice(0, length), WeightShard((first, *(0 for _ in shape[1:])), (length, *shape[1:]))
        return
    if len(shape) != 3 or stored_shape != (shape[0] * shape[1], shape[2]):
        raise ValueError(f"{list(stored_shape)} is not how {list(shape)} is cut")
    _, rows, columns = shape
    if not length:
        yield slice(0, 0), WeightShard((0, 0, 0), (0, rows, columns))
    done = 0
    while done < length:
        expert, row = divmod(first + done, rows)
        whole = 0 if row else (length - done) // rows
        count = whole * rows or min(length - done, rows - row)
        yield slice(done, done + count), WeightShard((expert, row, 0), (whole or 1, count // (whole or 1), columns))
        done += count


def even_part(length: int, parts: int, part: int) -> tuple[int, int]:
    """(first, length) of one of `parts` consecutive parts, as even as possible, longer ones first (as `torch.tensor_split`)."""
    size, longer = divmod(length, parts)
    return part * size + min(part, longer), size + (part < longer)
