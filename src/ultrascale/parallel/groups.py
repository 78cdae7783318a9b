"""Process groups: every group of a model and a layout, made and warmed up in one order.

    queue         groups                                          who starts what they do
    up, down      pp, twice: messages to higher ranks, to lower   the pipeline, beside the computation
    blocks        tp, cp, dp (counts of experts), copies          a block's passes, in their own order
    experts       ep, expert_tp                                   the same, while shared experts use tp
    parameters    data and expert data: replicate, shard          FSDP2, on streams of its own

NCCL does what a group is asked for one after the other, so groups of the same ranks are one where they have one queue, and a
communicator's memory is taken once. On CPU queues make no difference and groups of the same ranks are one: each has a thread
that wakes a hundred times a second.

Three things that can stop a run at its start, and what rules them out here:

    names           torch names a group by its ranks and by how many groups this rank has, and only members need to call: a
                    thousand ranks make eight groups each, not thirteen hundred. So every rank is in exactly one group of every
                    axis, and which axes there are is said by model and layout alone: no rank ever has one group less
    communicators   NCCL's are made by the first collective of a group, which all its ranks must take part in. Later only some
                    may have anything to say: a ring's first hop, the ends of a pipeline
    pairs           a send by itself makes a communicator of two ranks, and the host waits for the other to come: two ranks
                    that first receive from one another wait for ever (pytorch#108378, #136248). Each pair has its first
                    message here, in one order of all pairs

A communicator is waited for only by ranks that have done with all before it in one order, so the first one that is not made yet
has all its ranks there: this cannot wait for ever.
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
"""Two ranks of a pipeline, the lower first, that send each other messages."""


class Groups(Protocol):
    """The part of `parallel.mesh.Mesh` that shards a model."""

    @property
    def coordinates(self) -> Coordinates: ...

    def group(self, axis: Any, /) -> dist.ProcessGroup | None: ...


class AxisGroups(NamedTuple):
    """Groups of ranks `stride` apart, all of one `size`: every rank is in one."""

    name: str
    size: int
    stride: int
    queue: Queue
    has_collectives: bool = True
    borders: tuple[Border, ...] = ()
    """Places in a group between which single messages go."""

    def ranks_with(self, rank: int) -> range:
        """The group that `rank` is in, ascending."""
        first = rank - rank // self.stride % self.size * self.stride
        return range(first, first + self.size * self.stride, self.stride)


def groups_of(model: Model, layout: Layout) -> list[AxisGroups]:
    """All groups that training `model` under `layout` needs, in the order in which every rank makes its own.

    Axes of one rank are left out, but for those of data parallelism, whose grids have two axes always.
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
    """The two axes of the grid of data parallelism, and those of the experts', where FSDP2 is needed."""
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
    """True if experts are held by other ranks than the weights around them."""
    return model.num_experts > 0 and layout.tp * layout.ep * layout.expert_tp > 1


def copies_of(model: Model, layout: Layout) -> list[int]:
    """Numbers of neighbours among which some weight's gradient must be summed, on some rank."""
    places = (shard_of(weight, layout, Coordinates.of(layout, 0)) for weight in weights(model))
    return sorted({weight_place.num_replicas for weight_place in places if weight_place.is_partial})


def copies_axis(count: int) -> str:
    """The name of the axis of `count` neighbours that hold the same part of a weight."""
    return f"{count} copies"


def borders_of(layout: Layout) -> tuple[Border, ...]:
    """Pairs of ranks of a pipeline that exchange messages. Those of even ranks to higher ones come first: each rank's
    neighbours then need not wait for a chain of all ranks before them."""
    if layout.pp == 1:
        return ()
    few = smallest_schedule(layout.schedule, layout.pp, layout.virtual_stages)
    pairs = {(min(message.sender, message.receiver), max(message.sender, message.receiver)) for message in messages(few)}
    return tuple(sorted(pairs, key=lambda pair: (pair[0] % 2, pair)))


def warm_up(groups: Sequence[tuple[AxisGroups, dist.ProcessGroup]], device: torch.device) -> None:
    """Have every communicator made, of the whole run first. All ranks call it at once, with the same axes.

    Raises LostRankError if another rank does not come.
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
    """Sends the first message from the lower to the higher rank: their communicator serves both ways."""
    sends = group.rank() == lower
    peer = higher if sends else lower
    with waiting(f"the first message of {name}", group, [peer]):
        if sends:
            work = dist.isend(token, group=group, group_dst=peer, tag=Tag.WARM_UP)
        else:
            work = dist.irecv(token, group=group, group_src=peer, tag=Tag.WARM_UP)
        wait_for(work, group)
