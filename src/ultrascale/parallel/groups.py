"""Process groups: all groups of a model and a layout, created and warmed up in one fixed order.

    queue         groups                                          users
    up, down      pp, twice: messages to higher ranks, to lower   the pipeline, overlapping with computation
    blocks        tp, cp, dp (expert counts), copies              forward and backward passes of a block, in order
    experts       ep, expert_tp                                   the same, while shared experts use tp
    parameters    data and expert data: replicate, shard          FSDP2, on its own streams

NCCL runs the operations of a group one after the other. Groups of the same ranks in the same queue are therefore one group,
which also saves a communicator's memory. On CPU queues make no difference and groups of the same ranks are always one: each has
a thread that wakes a hundred times a second.

Three causes of hangs at start-up, and how they are ruled out here:

    names           torch names a group by its ranks and by how many groups this rank has created, and only members need to
                    call: a thousand ranks create eight groups each, not thirteen hundred. So every rank is in exactly one
                    group of every axis, and model and layout alone decide which axes exist: no rank ever has one group less
    communicators   NCCL creates a communicator at the first collective of a group, which all its ranks must join. Later only
                    some may have something to send: a ring's first hop, the ends of a pipeline
    pairs           a single send creates a communicator of two ranks, and the host waits for the peer: two ranks that both
                    first receive from each other hang (pytorch#108378, #136248). Each pair sends its first message here, in
                    one global order of pairs

A rank waits for a communicator only after all earlier ones in the global order, so the ranks of the first missing communicator
are all waiting for it: no deadlock is possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.tags import Tag
from ultrascale.parallel.time_limits import wait_for
from ultrascale.schedules.build import smallest_schedule
from ultrascale.schedules.ends import has_mirrors, shares_embedding
from ultrascale.schedules.messages import messages
from ultrascale.work.sharding.places import Coordinates, shard_of

Queue = Literal["up", "down", "blocks", "experts", "parameters"]
Border = tuple[int, int]
"""Two pipeline ranks that exchange messages, the lower first."""


class Groups(Protocol):
    """The subset of `parallel.mesh.Mesh` that sharding a model needs."""

    @property
    def coordinates(self) -> Coordinates: ...

    def group(self, axis: Any, /) -> dist.ProcessGroup | None: ...


class AxisGroups(NamedTuple):
    """Groups of `size` ranks, `stride` apart: every rank is in exactly one."""

    name: str
    size: int
    stride: int
    queue: Queue
    has_collectives: bool = True
    borders: tuple[Border, ...] = ()
    """Pairs of places in a group that exchange single messages."""

    def ranks_with(self, rank: int) -> range:
        """Ranks of the group that contains `rank`, ascending."""
        first = rank - rank // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


def groups_of(model: Model, layout: Layout) -> list[AxisGroups]:
    """All groups that training `model` under `layout` needs, in the order in which every rank creates them.

    Axes of one rank are left out, except those of data parallelism, whose grids always have two axes.
    """
    stride = layout.world_size // layout.pp
    borders, exchanges = borders_of(layout), shares_embedding(model, layout) or has_mirrors(layout)
    groups = [
        AxisGroups("pp", layout.pp, stride, "up", has_collectives=exchanges, borders=borders),
        AxisGroups("pp, downwards", layout.pp, stride, "down", has_collectives=False, borders=borders),
        AxisGroups("tp", *layout.group("tp"), "blocks"),
        AxisGroups("cp", *layout.group("cp"), "blocks"),
    ]
    if model.num_experts:
        if model.router_aux_loss_scope == "global":
            groups.append(AxisGroups("dp", layout.dp, layout.cp * layout.tp, "blocks"))
        groups += [AxisGroups(axis, *layout.group(axis), "experts") for axis in ("ep", "expert_tp")]
    groups += [AxisGroups(copies_axis(count), count, 1, "blocks") for count in copies_of(model, layout)]
    return [axis for axis in groups if axis.size > 1] + list(data_groups(model, layout))


def data_groups(model: Model, layout: Layout) -> Iterator[AxisGroups]:
    """The two axes of the data-parallel grid, and those of the experts' grid, where FSDP2 is needed."""
    differ = experts_differ(model, layout)
    if layout.dp * layout.cp == 1 and not (differ and layout.expert_dp > 1):
        return
    for axis in ("replicate", "shard"):
        yield AxisGroups(f"data {axis}", *layout.group(axis), "parameters")
    if differ:
        inner, shard_size = layout.ep * layout.expert_tp, layout.expert_shard_size
        yield AxisGroups("expert data replicate", layout.expert_dp // shard_size, shard_size * inner, "parameters")
        yield AxisGroups("expert data shard", shard_size, inner, "parameters")


def experts_differ(model: Model, layout: Layout) -> bool:
    """True if experts are sharded over other ranks than the weights around them."""
    return model.num_experts > 0 and layout.tp * layout.ep * layout.expert_tp > 1


def copies_of(model: Model, layout: Layout) -> list[int]:
    """Sizes of the groups of neighbouring ranks that must sum some weight's gradient."""
    shards = (shard_of(weight, layout, Coordinates.of(layout, 0)) for weight in weights(model))
    return sorted({shard.num_tp_copies for shard in shards if shard.is_partial})


def copies_axis(count: int) -> str:
    """Name of the axis of `count` neighbouring ranks that hold the same part of a weight."""
    return f"{count} copies"


def borders_of(layout: Layout) -> tuple[Border, ...]:
    """Pairs of pipeline ranks that exchange messages. Pairs whose lower rank is even come first, so that no rank waits for a
    chain of all ranks before it."""
    if layout.pp == 1:
        return ()
    few = smallest_schedule(layout.schedule, layout.pp, layout.virtual_stages)
    pairs = {(min(message.sender, message.receiver), max(message.sender, message.receiver)) for message in messages(few)}
    return tuple(sorted(pairs, key=lambda pair: (pair[0] % 2, pair)))


def warm_up(groups: Sequence[tuple[AxisGroups, dist.ProcessGroup]], device: torch.device) -> None:
    """Create every communicator, that of the whole run first. All ranks call it at once, with the same axes.

    Raises LostRankError if another rank does not join.
    """
    token = torch.zeros(1, device=device)
    _first_collective(token, "all ranks", dist.group.WORLD)
    for axis, group in groups:
        if axis.has_collectives and axis.size > 1:
            _first_collective(token, axis.name, group)
        for lower, higher in axis.borders:
            if group.rank() in (lower, higher):
                _first_message(token, axis.name, group, lower, higher)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_collective(token: torch.Tensor, name: str, group: dist.ProcessGroup | None) -> None:
    with waiting(f"the first collective of {name}", group):
        dist.all_reduce(token, group=group)


def _first_message(token: torch.Tensor, name: str, group: dist.ProcessGroup, lower: int, higher: int) -> None:
    """Send the first message from the lower to the higher rank: their communicator serves both directions."""
    sends = group.rank() == lower
    peer = higher if sends else lower
    with waiting(f"the first message of {name}", group, [peer]):
        if sends:
            work = dist.isend(token, group=group, group_dst=peer, tag=Tag.WARM_UP)
        else:
            work = dist.irecv(token, group=group, group_src=peer, tag=Tag.WARM_UP)
        wait_for(work, group)
