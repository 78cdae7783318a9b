"""Scales of weights that are gathered in fp8 (`parallel.fp8_gather`): what ranks agree on once an update, and keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ultrascale.spec.fp8_slots import SLOT_BYTES, is_delayed, num_weight_scales, weights_gathered_in_fp8
from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.weights import Weight


class ScaleTable(NamedTuple):
    """Of the weights of a rank that are cut over one group. Groups are (size, stride)."""

    shards: tuple[int, int]
    sharing: tuple[int, int]
    """Ranks of tp, or expert_tp, that hold other parts of what has one scale."""
    num_bytes: int
    shared_bytes: int
    """Of the scales of which `sharing` hold parts."""


def scale_tables(model: Model, layout: Layout, held: Iterable[Weight]) -> Iterator[ScaleTable]:
    """`held`: the weights of a rank's stages, of the shapes that it has before data parallelism cuts them."""
    is_shared = weights_gathered_in_fp8(model, layout)
    gathered = [weight for weight in held if weight.name in is_shared]
    of_experts = layout.group("expert_shard"), layout.group("expert_tp")
    for experts, groups in ((False, (layout.group("shard"), layout.group("tp"))), (True, of_experts)):
        sizes = {w.name: SLOT_BYTES * num_weight_scales(w.shape, layout) for w in gathered if w.is_expert is experts}
        if sizes:
            yield ScaleTable(*groups, sum(sizes.values()), sum(size for name, size in sizes.items() if is_shared[name]))


def scale_bytes(tables: Iterable[ScaleTable], layout: Layout) -> int:
    """Kept from step to step: scales, and for a history the largest magnitudes that they follow from."""
    return (2 if is_delayed(layout) else 1) * sum(table.num_bytes for table in tables)


def scale_messages(tables: Iterable[ScaleTable], layout: Layout) -> Iterator[tuple[tuple[int, int], int]]:
    """The all-reduces of an update, (group, bytes); none where a history tells scales."""
    for table in () if is_delayed(layout) else tables:
        yield table.shards, table.num_bytes
        yield table.sharing, table.shared_bytes
