"""The state of the outer optimizer in host memory, for each part of a weight that a rank holds between steps

    anchor       the last common weights                             always
    momentum     of the outer optimizer                              with momentum
    residual     rounding error of sent deltas, to be sent later      in bf16, int8, int4
    snapshot     the weights when a fragment was sent                with overlap
    mean         of the islands' deltas, until it is applied          with overlap
    deltas       in flight, kept in case the exchange is repeated    with a quorum

in the dtype of weights between steps: 4 to 24 bytes per parameter that the rank holds, and no device memory.

A bucket is sent at once: the parts of a fragment that the same ranks of the island hold as replicas (of HSDP or ZeRO stage 0).
Each of these ranks sends one piece of the bucket, and they all-gather the results within the island.

Where islands differ in dp, ranks of different islands hold different shards. All ranks at one pp and tp coordinate (for
experts: pp, ep and expert_tp) then all-gather their shards, and the first of them, as many as the smallest island has, each
send one piece. Each island's delta is weighted by its dp.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from ultrascale.description.sections.islands import Islands, replicas_of
from ultrascale.islands.encoding import encode
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import LocalParameter, Share, local


@dataclass
class WeightPart:
    """This rank's part of one weight, and its outer state."""

    shard: LocalParameter
    anchor: Tensor
    momentum: Tensor | None
    residual: Tensor | None
    snapshot: Tensor | None = None
    mean: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """The current weights."""
        return local(self.shard.parameter.detach())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the table above that this part has, by name."""
        for name in ("anchor", "momentum", "residual", "snapshot", "mean"):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def allow_overlap(self) -> None:
        """Allocate the tensors for deltas in flight."""
        if self.snapshot is None:
            self.snapshot, self.mean = self.anchor.clone(), torch.zeros_like(self.anchor)

    def step(self, islands: Islands) -> None:
        """The outer step: move the anchor by the mean, and set the weights to it plus their change since they were sent."""
        assert self.mean is not None
        gradient, outer = self.mean, islands.outer
        if self.momentum is not None:
            self.momentum.mul_(outer.momentum).add_(gradient)
            nesterov = outer.optimizer == "nesterov"
            gradient = gradient + outer.momentum * self.momentum if nesterov else self.momentum
        self.anchor.sub_(outer.lr * gradient)
        weight = self.weights
        moved = None if self.snapshot is None else weight.cpu() - self.snapshot
        weight.copy_(self.anchor if moved is None else self.anchor + moved)


@dataclass
class DeltaBucket:
    """Parts of a fragment that are sent together."""

    parts: list[WeightPart]
    num_senders: int
    """Number of this island's ranks that hold the same parts, and send one piece each."""
    sender: int
    """Index of this rank among the senders; from `num_senders` on, the rank has no piece."""
    elements: int
    """Elements of a sender's piece, padded to a multiple of the number of islands."""
    place: str
    """Name of the set of ranks that hold the same parts, the same on all islands."""
    grid: DeviceMesh | None
    """Ranks that hold shards (dp_shard) and replicas of them (dp_replicate); None if that is this rank alone."""
    gathers_shards: bool = False
    """True if islands differ in dp, so that shards are all-gathered before they are sent."""
    weight: float = 1.0
    """Weight of this island's deltas in their sum."""

    @property
    def like(self) -> str:
        """Name of this rank's set of counterparts on all islands."""
        return f"{self.sender % self.num_senders} at {self.place}"

    @property
    def sends(self) -> bool:
        """True if this rank has a piece to send."""
        return self.sender < self.num_senders

    def deltas(self) -> Tensor:
        """This rank's piece of the delta from the anchor plus earlier rounding residuals, [elements]."""
        flat = [part.anchor - part.weights.to(part.anchor.device) for part in self.parts]
        flat = [delta if part.residual is None else delta + part.residual for delta, part in zip(flat, self.parts, strict=True)]
        for part in self.parts:
            if part.snapshot is not None:
                part.snapshot.copy_(part.weights)
        whole = torch.cat([delta.flatten() for delta in self.gathered(flat)])
        if self.weight != 1.0:
            whole *= self.weight
        rows = pad(whole, (0, self.num_senders * self.elements - whole.numel())).view(self.num_senders, self.elements)
        return rows[self.sender].contiguous() if self.sends else whole.new_zeros(1).expand(self.elements)

    def receive(self, mean: Tensor, lost: Tensor) -> None:
        """Store the mean of this rank's piece, and the rounding error; collective among ranks that hold the same parts."""
        for part, part_mean in zip(self.parts, self._split(self._gather(mean)), strict=True):
            if part.mean is None:
                part.mean = part_mean.clone()
            else:
                part.mean.copy_(part_mean)
        if self.parts[0].residual is not None:
            for part, part_lost in zip(self.parts, self._split(self._gather(lost)), strict=True):
                assert part.residual is not None
                part.residual.copy_(part_lost if self.weight == 1.0 else part_lost / self.weight)

    def gathered(self, parts: list[Tensor]) -> list[Tensor]:
        """`parts` of this bucket's weights in the form in which they are sent: all-gathered and flat if islands differ in dp;
        collective then."""
        if not self.gathers_shards or self.grid is None:
            return parts
        rows = [pad(shard.flatten(), (0, size - shard.numel())) for shard, size in zip(parts, self._sizes, strict=True)]
        every = self._gathered(torch.cat(rows)[None], "dp_shard").split(self._sizes, dim=1)  # [ranks, elements] of each
        return [shards.flatten()[: part.shard.parameter.numel()] for shards, part in zip(every, self.parts, strict=True)]

    @property
    def _sizes(self) -> list[int]:
        """Elements of the largest shard of each weight, in whole rows as FSDP2 shards them."""
        assert self.grid is not None
        shards, weights = self.grid.size(1), [part.shard.parameter for part in self.parts]
        return [-(-len(weight) // shards) * (weight.numel() // len(weight)) for weight in weights]

    def _gather(self, piece: Tensor) -> Tensor:
        """Every sender's piece, in order: an all-gather."""
        rows = piece[None]
        if self.grid is not None:
            for axis in ("dp_shard", "dp_replicate")[not self.gathers_shards :]:
                rows = self._gathered(rows, axis)
        return rows[: self.num_senders].flatten()

    def _gathered(self, rows: Tensor, axis: str) -> Tensor:
        """All-gather of `rows` [n, m] along an axis of the grid, in rank order."""
        assert self.grid is not None
        group, device = self.grid.get_group(axis), self.parts[0].weights.device
        if group.size() == 1:
            return rows
        whole = torch.empty(group.size() * len(rows), rows.shape[1], dtype=rows.dtype, device=device)
        with waiting("the outer step's gather within the island", group, tensor=whole):
            dist.all_gather_into_tensor(whole, rows.to(device).contiguous(), group=group)
        return whole.to(rows.device)

    def _split(self, flat: Tensor) -> Iterator[Tensor]:
        """This rank's parts of an all-gathered bucket."""
        together = self.gathers_shards and self.grid is not None
        shard, first = self.grid.get_local_rank("dp_shard") if self.grid is not None else 0, 0
        sizes = self._sizes if together else [part.anchor.numel() for part in self.parts]
        for part, size in zip(self.parts, sizes, strict=True):
            whole = flat[first : first + (part.shard.parameter.numel() if together else size)]
            first += len(whole)
            yield (whole[shard * size :][: part.anchor.numel()] if together else whole).view_as(part.anchor)


@dataclass
class OuterState:
    """Outer state of a rank, by fragment."""

    islands: Islands
    share: Share
    fragments: list[list[DeltaBucket]] = field(init=False)

    def __post_init__(self) -> None:
        fragments: list[dict[bool, list[WeightPart]]] = [defaultdict(list) for _ in range(self.islands.fragments)]
        for shard in self.share.local_parameters:
            apart, _ = replicas_of(shard.weight, self.share.model, self.share.layout)
            fragments[self.islands.fragment(shard.weight)][apart].append(self._part(shard))
        self.fragments = [[self._bucket(parts, apart) for apart, parts in fragment.items()] for fragment in fragments]

    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one round, every fragment once, computed from the encoded size of the messages without
        sending."""
        count, sent = self.islands.count, 0
        for bucket in self.buckets():
            message = encode(bucket.deltas().view(count, -1), self.islands.dtype)
            sent += 2 * (count - 1) * message.shape[1] * bucket.sends
        return sent

    def host_bytes(self) -> int:
        """Peak bytes of host memory: all tensors, and with a quorum deltas in flight, which are kept in case an exchange fails.
        After the run's last step these are of all fragments."""
        kept = sum(tensor.nbytes for part in self.parts() for _, tensor in part.tensors())
        return kept + sum(bucket.deltas().nbytes * bucket.sends for bucket in self.buckets() if self.islands.quorum)

    def buckets(self) -> Iterator[DeltaBucket]:
        """All buckets, in a fixed order."""
        return (bucket for buckets in self.fragments for bucket in buckets)

    def parts(self) -> Iterator[WeightPart]:
        """All parts, in a fixed order."""
        return (part for bucket in self.buckets() for part in bucket.parts)

    def likes(self) -> dict[str, bool]:
        """Names of this rank's sets of counterparts, in a fixed order, and True if it sends there."""
        return {bucket.like: bucket.sends for bucket in self.buckets()}

    def allow_overlap(self) -> None:
        """Allocate the tensors for fragments in flight."""
        for part in self.parts():
            part.allow_overlap()

    def forget_residuals(self) -> None:
        """Zero the residuals: they belong to another island, which sends them itself."""
        for part in self.parts():
            if part.residual is not None:
                part.residual.zero_()

    def anchors(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Anchors in the form that is equal on all islands, by the set of ranks that hold them; collective if islands differ in
        dp."""
        return ((bucket.place, bucket.gathered([part.anchor for part in bucket.parts])) for bucket in self.buckets())

    def anchor_here(self) -> None:
        """Set the anchors to the current weights."""
        for part in self.parts():
            part.anchor.copy_(part.weights)

    def step(self, fragment: int) -> None:
        """The outer step of a fragment whose means have arrived."""
        for bucket in self.fragments[fragment]:
            for part in bucket.parts:
                part.step(self.islands)
                if not self.islands.overlap_steps and part.snapshot is None:
                    part.mean = None
        increment_version(self.share.parameters())  # low-precision copies are refreshed
        self.share.expect_other_weights()

    def _part(self, shard: LocalParameter) -> WeightPart:
        weight = local(shard.parameter.detach())
        anchor = torch.empty_like(weight, device="meta" if weight.is_meta else "cpu").copy_(weight)  # meta: a trace
        momentum = torch.zeros_like(anchor) if self.islands.outer.momentum else None
        residual = torch.zeros_like(anchor) if self.islands.dtype != "fp32" else None
        part = WeightPart(shard, anchor, momentum, residual)
        if self.islands.overlap_steps:
            part.allow_overlap()
        return part

    def _bucket(self, parts: list[WeightPart], experts: bool) -> DeltaBucket:
        islands, layout, coordinates, parameter = (
            self.islands,
            self.share.layout,
            self.share.mesh.coordinates,
            parts[0].shard.parameter,
        )
        grid = parameter.device_mesh if isinstance(parameter, DTensor) else None
        copy, shard = (0, 0) if grid is None else (grid.get_local_rank("dp_replicate"), grid.get_local_rank("dp_shard"))
        if islands.uneven_dp:
            num_senders, elements = islands.num_senders(layout, experts=experts), sum(p.shard.parameter.numel() for p in parts)
            place = (
                f"pp {coordinates.pp}, ep {coordinates.ep}, expert_tp {coordinates.expert_tp}"
                if experts
                else f"pp {coordinates.pp}, tp {coordinates.tp}"
            )
            sender, weight = (0 if grid is None else copy * grid.size(1) + shard), float(layout.dp)
        else:
            num_senders, elements = 1 if grid is None else grid.size(0), sum(part.anchor.numel() for part in parts)
            place, sender, weight = f"rank {self.share.mesh.rank}", copy, 1.0
        piece = islands.piece(elements, num_senders) * islands.count
        return DeltaBucket(parts, num_senders, sender, piece, place, grid, islands.uneven_dp, weight)
