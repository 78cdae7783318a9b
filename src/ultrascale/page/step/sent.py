"""Communication of a rank per step, by axis of the layout: messages and bytes as counted by the simulation of its step.

Tests compare these counts, message by message, with what the trainer sends (`ultrascale trace`); so they are shown only for
layouts that it runs, planned for it.
"""

from __future__ import annotations

from typing import NamedTuple

from ultrascale.config.rules.trainable import untrainable
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run
from ultrascale.plan.time.price import Prediction
from ultrascale.trace.groups import axis_of, crosses_nodes
from ultrascale.trace.planned import planned_rank

NAMES = {"shard": "dp: shards", "replicate": "dp: replicas", "dp x cp": "dp and cp", "all": "all ranks"}
LEAST_BYTES = 1024
"""Smaller messages, such as the step's norm, are not shown."""


class CommunicationVolume(NamedTuple):
    """Messages of one kind over one axis, of one rank in one step."""

    axis: str
    kind: str
    group: int
    """Ranks of the group."""
    over: str
    """`node` or `network`."""
    count: int
    num_bytes: int
    """Bytes that leave the rank: for an all-gather all but its own shard, for a ring all-reduce twice that."""


def communication_per_step(run: Run, prediction: Prediction) -> tuple[int, list[CommunicationVolume]]:
    """The rank shown, one in the middle of the pipeline, and its communication, the largest first."""
    workload, layout = prediction.workload, prediction.layout
    rank = (layout.pp // 2) * (layout.world_size // layout.pp)
    refused = untrainable(workload.model, layout)
    if layout.world_size == 1 or workload.stack.name != "ultrascale" or refused:
        return rank, []
    try:
        planned = planned_rank(run, rank, "cuda")
    except SpecError:
        planned = None
    per_node = workload.cluster.node.num_accelerators
    rows = [
        CommunicationVolume(
            NAMES.get(axis := axis_of(layout, group.size, group.stride), axis), group.kind.replace("_", "-"), group.size,
            "network" if crosses_nodes(rank, group.size, group.stride, per_node) else "node",
            traffic.count, round(traffic.num_bytes * (1.0 if axis == "cp" else leaving_share(group.kind, group.size))),
        )
        for group, traffic in ({} if planned is None else planned.traffic).items()
    ]  # fmt: skip
    return rank, sorted((row for row in rows if row.num_bytes >= LEAST_BYTES), key=lambda row: -row.num_bytes)


def leaving_share(kind: str, ranks: int) -> float:
    """Fraction of a message's buffer that a rank sends: rings for all but single messages, which already count only what leaves
    (as do all over cp)."""
    return {"send": 1.0, "all_reduce": 2 * (ranks - 1) / ranks}.get(kind, (ranks - 1) / ranks)
