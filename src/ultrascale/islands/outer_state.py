"""The state of the outer steps that a rank keeps in host memory, for each part of a weight that it holds between steps

    anchor       the last common weights                             always
    momentum     of the outer optimizer                              with momentum
    residual     what was rounded off of moves, to be sent later     in bf16, int8, int4
    snapshot     the weights as they were when a fragment was sent   with overlap
    mean         of the islands' moves, until it is applied          with overlap

in the dtype of weights between steps: 4 to 20 bytes a parameter that the rank holds, and none of the device's.

A bucket is what is sent at once: the parts of a fragment that the same ranks of the island hold alike (replicas, of HSDP or
ZeRO stage 0). Each of those sends its piece of the bucket, and what comes back they gather within the island.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from ultrascale.description.sections.islands import Islands, replicas_of
from ultrascale.islands.encoding import encode
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import Held, Share, local


@dataclass
class Part:
    """This rank's part of one weight, and the outer state of it."""

    held: Held
    anchor: Tensor
    momentum: Tensor | None
    residual: Tensor | None
    snapshot: Tensor | None = None
    mean: Tensor | None = None

    @property
    def own(self) -> Tensor:
        """The weights as they are now."""
        return local(self.held.parameter.detach())

    def kept(self) -> Iterator[tuple[str, Tensor]]:
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
        own = self.own
        moved = None if self.snapshot is None else own.cpu() - self.snapshot
        own.copy_(self.anchor if moved is None else self.anchor + moved)


@dataclass
class Bucket:
    """Parts of a fragment that are sent at once."""

    parts: list[Part]
    replicas: int
    """Ranks of this island that hold the same."""
    replica: int
    """Index of this replica."""
    group: dist.ProcessGroup | None
    elements: int
    """Elements of a replica's share, padded to a whole number of pieces, one for each island."""

    def moves(self) -> Tensor:
        """This replica's share of the move since the anchor plus earlier rounding residuals, [elements]."""
        flat = [part.anchor - part.own.to(part.anchor.device) for part in self.parts]
        flat = [move if part.residual is None else move + part.residual for move, part in zip(flat, self.parts, strict=True)]
        for part in self.parts:
            if part.snapshot is not None:
                part.snapshot.copy_(part.own)
        whole = torch.cat([move.flatten() for move in flat])
        return self._rows(whole)[self.replica].contiguous()

    def arrived(self, mean: Tensor, lost: Tensor) -> None:
        """Keep the mean of this replica's share, and what was rounded off; collective among the replicas."""
        for part, own in zip(self.parts, self._split(self._gather(mean)), strict=True):
            if part.mean is None:
                part.mean = own.clone()
            else:
                part.mean.copy_(own)
        if self.parts[0].residual is not None:
            for part, own in zip(self.parts, self._split(self._gather(lost)), strict=True):
                assert part.residual is not None
                part.residual.copy_(own)

    def _rows(self, flat: Tensor) -> Tensor:
        """The share of every replica, [replicas, elements], padded with zeros."""
        return pad(flat, (0, self.replicas * self.elements - flat.numel())).view(self.replicas, self.elements)

    def _gather(self, own: Tensor) -> Tensor:
        """Every replica's share, in order."""
        if self.replicas == 1:
            return own
        device = self.parts[0].own.device
        whole = torch.empty(self.replicas * own.numel(), dtype=own.dtype, device=device)
        with waiting("the outer step's gather within the island", self.group, tensor=whole):
            dist.all_gather_into_tensor(whole, own.to(device), group=self.group)
        return whole.cpu()

    def _split(self, flat: Tensor) -> Iterator[Tensor]:
        """The parts of a whole bucket."""
        first = 0
        for part in self.parts:
            yield flat[first : first + part.anchor.numel()].view_as(part.anchor)
            first += part.anchor.numel()


@dataclass
class OuterState:
    """All of a rank, by fragment."""

    islands: Islands
    share: Share
    fragments: list[list[Bucket]] = field(init=False)

    def __post_init__(self) -> None:
        found: list[dict[bool, list[Part]]] = [defaultdict(list) for _ in range(self.islands.fragments)]
        for held in self.share.held:
            apart, _ = replicas_of(held.weight, self.share.model, self.share.layout)
            found[self.islands.fragment(held.weight)][apart].append(self._part(held))
        self.fragments = [[self._bucket(parts) for parts in some.values()] for some in found]

    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one round, every fragment once, counted from the encoded size of the messages; nothing
        is sent."""
        count, sent = self.islands.count, 0
        for bucket in (bucket for buckets in self.fragments for bucket in buckets):
            sent += 2 * (count - 1) * encode(bucket.moves().view(count, -1), self.islands.dtype).shape[1]
        return sent

    def parts(self) -> Iterator[Part]:
        """All parts, in a fixed order."""
        return (part for buckets in self.fragments for bucket in buckets for part in bucket.parts)

    def allow_overlap(self) -> None:
        """Make room for fragments under way."""
        for part in self.parts():
            part.allow_overlap()

    def forget_residuals(self) -> None:
        """Zeroes the residuals: they belong to another island, which sends them itself."""
        for part in self.parts():
            if part.residual is not None:
                part.residual.zero_()

    def anchor_here(self) -> None:
        """Take the weights as they are for the common ones."""
        for part in self.parts():
            part.anchor.copy_(part.own)

    def step(self, fragment: int) -> None:
        """The outer step of a fragment whose means have arrived."""
        for bucket in self.fragments[fragment]:
            for part in bucket.parts:
                part.step(self.islands)
                if not self.islands.overlap_steps and part.snapshot is None:
                    part.mean = None
        increment_version(self.share.parameters())  # copies of narrow precision are made anew
        self.share.expect_other_weights()

    def _part(self, held: Held) -> Part:
        own = local(held.parameter.detach())
        anchor = torch.empty_like(own, device="meta" if own.is_meta else "cpu").copy_(own)  # meta: a trace
        momentum = torch.zeros_like(anchor) if self.islands.outer.momentum else None
        residual = torch.zeros_like(anchor) if self.islands.dtype != "fp32" else None
        part = Part(held, anchor, momentum, residual)
        if self.islands.overlap_steps:
            part.allow_overlap()
        return part

    def _bucket(self, parts: list[Part]) -> Bucket:
        first, elements = parts[0].held, sum(part.anchor.numel() for part in parts)
        parameter = first.parameter
        group = parameter.device_mesh.get_group("dp_replicate") if isinstance(parameter, DTensor) else None
        replicas, replica = (1, 0) if group is None else (group.size(), group.rank())
        return Bucket(parts, replicas, replica, group, self.islands.piece(elements, replicas) * self.islands.count)
