"""The state of the outer steps that a rank keeps in host memory, for each part of a weight that it holds between steps

    anchor       the last common weights                             always
    momentum     of the outer optimizer                              with momentum
    residual     what was rounded off of moves, to be sent later     in bf16, int8, int4
    snapshot     the weights as they were when a fragment was sent   with overlap
    mean         of the islands' moves, until it is applied          with overlap
    moves        under way, kept for whoever is still to have them   with a quorum

in the dtype of weights between steps: 4 to 24 bytes a parameter that the rank holds, and none of the device's.

A bucket is what is sent at once: the parts of a fragment that the same ranks of the island hold alike (replicas, of HSDP or
ZeRO stage 0). Each of those sends its piece of the bucket, and what comes back they gather within the island.

Where islands differ in dp, no rank of one holds what a rank of another does. All ranks at one place of pp and tp (of experts:
of pp, ep and expert_tp) then gather what they hold together, and the first of them, as many as there are in the smallest
island, each send a piece of that. A move counts by its island's dp.
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
class Part:
    """This rank's part of one weight, and the outer state of it."""

    held: LocalParameter
    anchor: Tensor
    momentum: Tensor | None
    residual: Tensor | None
    snapshot: Tensor | None = None
    mean: Tensor | None = None

    @property
    def weights(self) -> Tensor:
        """The weights as they are now."""
        return local(self.held.parameter.detach())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the table above that this part keeps, by name."""
        for name in ("anchor", "momentum", "residual", "snapshot", "mean"):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def allow_overlap(self) -> None:
        """Make room for what is under way."""
        if self.snapshot is None:
            self.snapshot, self.mean = self.anchor.clone(), torch.zeros_like(self.anchor)

    def step(self, islands: Islands) -> None:
        """The outer step: the anchor moves by the mean, and the weights to it, with what they moved since they were sent."""
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
class Bucket:
    """Parts of a fragment that are sent at once."""

    parts: list[Part]
    num_senders: int
    """Ranks of this island that hold the same, and send a piece each."""
    sender: int
    """Index of this rank among them; one past their last has no piece."""
    elements: int
    """Elements of a sender's piece, padded to a whole number of pieces, one for each island."""
    place: str
    """Name of the ranks that hold the same together, alike on all islands."""
    grid: DeviceMesh | None
    """Ranks that hold parts (dp_shard) and copies of them (dp_replicate); None where that is this rank alone."""
    gathers_shards: bool = False
    """True where islands differ in dp, so that parts are put together before they are sent."""
    weight: float = 1.0
    """Factor of the moves of this island in their sum."""

    @property
    def like(self) -> str:
        """Name of this rank's like on all islands."""
        return f"{self.sender % self.num_senders} at {self.place}"

    @property
    def sends(self) -> bool:
        """True if this rank has a piece to send."""
        return self.sender < self.num_senders

    def moves(self) -> Tensor:
        """This replica's share of the move since the anchor plus earlier rounding residuals, [elements]."""
        flat = [part.anchor - part.weights.to(part.anchor.device) for part in self.parts]
        flat = [move if part.residual is None else move + part.residual for move, part in zip(flat, self.parts, strict=True)]
        for part in self.parts:
            if part.snapshot is not None:
                part.snapshot.copy_(part.weights)
        whole = torch.cat([move.flatten() for move in self.gathered(flat)])
        if self.weight != 1.0:
            whole *= self.weight
        rows = pad(whole, (0, self.num_senders * self.elements - whole.numel())).view(self.num_senders, self.elements)
        return rows[self.sender].contiguous() if self.sends else whole.new_zeros(1).expand(self.elements)

    def receive(self, mean: Tensor, lost: Tensor) -> None:
        """Keep the mean of this rank's piece, and what was rounded off; collective among ranks that hold the same."""
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
        """`parts` of this bucket's weights as they are sent: put together, flat, where islands differ; collective then."""
        if not self.gathers_shards or self.grid is None:
            return parts
        rows = [pad(shard.flatten(), (0, size - shard.numel())) for shard, size in zip(parts, self._sizes, strict=True)]
        every = self._gathered(torch.cat(rows)[None], "dp_shard").split(self._sizes, dim=1)  # [ranks, elements] of each
        return [shards.flatten()[: part.held.parameter.numel()] for shards, part in zip(every, self.parts, strict=True)]

    @property
    def _sizes(self) -> list[int]:
        """Elements of the largest shard of each weight, by whole rows as FSDP2 shards."""
        assert self.grid is not None
        shards, weights = self.grid.size(1), [part.held.parameter for part in self.parts]
        return [-(-len(weight) // shards) * (weight.numel() // len(weight)) for weight in weights]

    def _gather(self, piece: Tensor) -> Tensor:
        """Every sender's piece, in order."""
        rows = piece[None]
        if self.grid is not None:
            for axis in ("dp_shard", "dp_replicate")[not self.gathers_shards :]:
                rows = self._gathered(rows, axis)
        return rows[: self.num_senders].flatten()

    def _gathered(self, rows: Tensor, axis: str) -> Tensor:
        """The `rows` [n, m] of all ranks along an axis of the grid, in order."""
        assert self.grid is not None
        group, device = self.grid.get_group(axis), self.parts[0].weights.device
        if group.size() == 1:
            return rows
        whole = torch.empty(group.size() * len(rows), rows.shape[1], dtype=rows.dtype, device=device)
        with waiting("the outer step's gather within the island", group, tensor=whole):
            dist.all_gather_into_tensor(whole, rows.to(device).contiguous(), group=group)
        return whole.to(rows.device)

    def _split(self, flat: Tensor) -> Iterator[Tensor]:
        """This rank's parts of a whole bucket."""
        together = self.gathers_shards and self.grid is not None
        shard, first = self.grid.get_local_rank("dp_shard") if self.grid is not None else 0, 0
        sizes = self._sizes if together else [part.anchor.numel() for part in self.parts]
        for part, size in zip(self.parts, sizes, strict=True):
            whole = flat[first : first + (part.held.parameter.numel() if together else size)]
            first += len(whole)
            yield (whole[shard * size :][: part.anchor.numel()] if together else whole).view_as(part.anchor)


@dataclass
class OuterState:
    """All of a rank, by fragment."""

    islands: Islands
    share: Share
    fragments: list[list[Bucket]] = field(init=False)

    def __post_init__(self) -> None:
        fragments: list[dict[bool, list[Part]]] = [defaultdict(list) for _ in range(self.islands.fragments)]
        for held in self.share.local_parameters:
            apart, _ = replicas_of(held.weight, self.share.model, self.share.layout)
            fragments[self.islands.fragment(held.weight)][apart].append(self._part(held))
        self.fragments = [[self._bucket(parts, apart) for apart, parts in fragment.items()] for fragment in fragments]

    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one round, every fragment once, counted from the encoded size of the messages; nothing
        is sent."""
        count, sent = self.islands.count, 0
        for bucket in self.buckets():
            message = encode(bucket.moves().view(count, -1), self.islands.dtype)
            sent += 2 * (count - 1) * message.shape[1] * bucket.sends
        return sent

    def host_bytes(self) -> int:
        """Bytes of host memory at most: all tensors, and with a quorum moves under way, which are needed again if an exchange
        fails. After the run's last step these are of all fragments."""
        kept = sum(tensor.nbytes for part in self.parts() for _, tensor in part.tensors())
        return kept + sum(bucket.moves().nbytes * bucket.sends for bucket in self.buckets() if self.islands.quorum)

    def buckets(self) -> Iterator[Bucket]:
        """All buckets, in a fixed order."""
        return (bucket for buckets in self.fragments for bucket in buckets)

    def parts(self) -> Iterator[Part]:
        """All parts, in a fixed order."""
        return (part for bucket in self.buckets() for part in bucket.parts)

    def likes(self) -> dict[str, bool]:
        """Names of this rank's like, in a fixed order, and whether it sends among them."""
        return {bucket.like: bucket.sends for bucket in self.buckets()}

    def allow_overlap(self) -> None:
        """Make room for fragments under way."""
        for part in self.parts():
            part.allow_overlap()

    def forget_residuals(self) -> None:
        """Zeroes the residuals: they belong to another island, which sends them itself."""
        for part in self.parts():
            if part.residual is not None:
                part.residual.zero_()

    def anchors(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Anchors as all islands hold them alike, by the place of the ranks that do; collective where islands differ."""
        return ((bucket.place, bucket.gathered([part.anchor for part in bucket.parts])) for bucket in self.buckets())

    def anchor_here(self) -> None:
        """Take the weights as they are for the common ones."""
        for part in self.parts():
            part.anchor.copy_(part.weights)

    def step(self, fragment: int) -> None:
        """The outer step of a fragment whose means have arrived."""
        for bucket in self.fragments[fragment]:
            for part in bucket.parts:
                part.step(self.islands)
                if not self.islands.overlap_steps and part.snapshot is None:
                    part.mean = None
        increment_version(self.share.parameters())  # copies of narrow precision are made anew
        self.share.expect_other_weights()

    def _part(self, held: LocalParameter) -> Part:
        weight = local(held.parameter.detach())
        anchor = torch.empty_like(weight, device="meta" if weight.is_meta else "cpu").copy_(weight)  # meta: a trace
        momentum = torch.zeros_like(anchor) if self.islands.outer.momentum else None
        residual = torch.zeros_like(anchor) if self.islands.dtype != "fp32" else None
        part = Part(held, anchor, momentum, residual)
        if self.islands.overlap_steps:
            part.allow_overlap()
        return part

    def _bucket(self, parts: list[Part], experts: bool) -> Bucket:
        islands, layout, coordinates, parameter = (
            self.islands,
            self.share.layout,
            self.share.mesh.coordinates,
            parts[0].held.parameter,
        )
        grid = parameter.device_mesh if isinstance(parameter, DTensor) else None
        copy, shard = (0, 0) if grid is None else (grid.get_local_rank("dp_replicate"), grid.get_local_rank("dp_shard"))
        if islands.uneven_dp:
            num_senders, elements = islands.num_senders(layout, experts=experts), sum(p.held.parameter.numel() for p in parts)
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
        return Bucket(parts, num_senders, sender, piece, place, grid, islands.uneven_dp, weight)
