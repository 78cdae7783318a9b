"""The ring of context parallelism: keys and values are sent hop by hop to the queries of other ranks, and their gradients back
to the ranks that own them.

    forward     at hop d a rank has the keys and values of the rank d places ahead. Before it works on them it sends them to
                the rank before it and posts the next receive: messages overlap with computation (Liu et al. 2023, "Ring
                Attention")
    backward    keys and values go round again; their gradients follow one hop behind: each rank adds its contribution and
                sends them on, and the last contributor sends them to the rank that owns them

Elements that a rank sends per layer, with C = 2 B S/n K E for its own keys and values: (n-1) C forward, as much again backward,
and as much for the gradients, which are sent in fp32 if activations are narrower. Only keys that a later rank needs travel on:
in zigzag order the late half of rank r goes r hops and no further, a quarter less in all; a sliding window ends it earlier.

Why not send directly to the ranks that need them: a ring crosses the border of a node once per hop, direct messages once per
pair. Packed tensors are [T, B, K, E + E'], so that a range of slots is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.parallel.context.context_masks import NOTHING, ContextMask, Slots
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.tags import Tag
from ultrascale.parallel.time_limits import wait_for


class Ring(NamedTuple):
    """Ranks of a group that form one ring: every `stride`-th, from `first` on."""

    group: dist.ProcessGroup | None
    """Process group of the ring; None if the ring has one place."""
    size: int
    place: int
    stride: int = 1
    first: int = 0

    def rank(self, place: int) -> int:
        """Group rank of a place; places wrap around."""
        return self.first + place % self.size * self.stride

    def source(self, distance: int) -> int:
        """Place whose keys this rank holds at hop `distance`."""
        return (self.place + distance) % self.size


class KeyValueBlock(NamedTuple):
    """Keys and values held at a hop, [B, K, T, E] and [B, K, T, E'], starting at slot `first` of their own rank."""

    key: Tensor
    value: Tensor
    first: int


class Messages:
    """Messages in flight between this rank and others of a group. Sent tensors are kept alive until all messages have
    arrived."""

    def __init__(
        self, group: dist.ProcessGroup | None, tag: Tag, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]
    ):
        self.sent, self.group, self.tag = sends, group, tag
        self.peers = sorted({rank for rank, _ in (*sends, *receives)})
        receiving = [dist.P2POp(dist.irecv, tensor, group=group, tag=tag, group_peer=rank) for rank, tensor in receives]
        sending = [dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=rank) for rank, tensor in sends]
        with self._waiting():
            self.works = dist.batch_isend_irecv(receiving + sending) if receiving or sending else []

    def wait(self) -> None:
        """Wait until all messages are complete; their buffers may then be overwritten."""
        with self._waiting():
            while self.works:
                wait_for(self.works.pop(), self.group)
        self.sent = []

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting(self.tag.what, self.group, self.peers)


def pack(key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack keys [B, K, T, E] and values [B, K, T, E'] into [T, B, K, E + E'], converted to `dtype` if given."""
    packed = buffer_for((0, key.shape[2]), key, value, key.dtype if dtype is None else dtype)
    for part, into in zip((key, value), unpack(packed, key.shape[-1]), strict=True):
        into.copy_(part)
    return packed


def unpack(packed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Keys [B, K, T, E = width] and values [B, K, T, E'], as views."""
    heads_first = packed.permute(1, 2, 0, 3)
    return heads_first[..., :width], heads_first[..., width:]


def buffer_for(slots: Slots, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Buffer for the packed keys and values of `slots`."""
    batch, heads, _, width = key.shape
    return key.new_empty(slots[1] - slots[0], batch, heads, width + value.shape[-1], dtype=dtype)


@dataclass
class KeysOnRing:
    """This rank's keys and values, [B, K, T, E] and [B, K, T, E'], and the ring that uses them."""

    key: Tensor
    value: Tensor
    mask: ContextMask
    ring: Ring


class RingKeys(KeysOnRing):
    """Keys and values that travel around the ring."""

    def hops(self) -> Iterator[KeyValueBlock | None]:
        """This rank's own keys and values, then at each hop those of the next rank, or None where no rank needs any from here
        on."""
        keys_values, width = KeyValueBlock(self.key, self.value, 0), self.key.shape[-1]
        packed: Tensor | None = None
        for distance in range(self.ring.size):
            going, coming = self._to_send(distance), self._to_send(distance, of_next=True)
            if going != NOTHING and packed is None:
                packed = pack(self.key, self.value)
            sends = (
                []
                if packed is None or going == NOTHING
                else [(self.ring.rank(self.ring.place - 1), _part(packed, keys_values, going))]
            )
            packed = None if coming == NOTHING else buffer_for(coming, self.key, self.value, self.key.dtype)
            receives = [] if packed is None else [(self.ring.rank(self.ring.place + 1), packed)]
            messages = Messages(self.ring.group, Tag.KEYS, sends, receives)
            yield keys_values
            messages.wait()
            keys_values = None if packed is None else KeyValueBlock(*unpack(packed, width), coming[0])

    def _to_send(self, distance: int, *, of_next: bool = False) -> Slots:
        """Slots that this rank sends (or, `of_next`, receives from the next rank) as hop `distance` begins."""
        if distance + 1 == self.ring.size:
            return NOTHING
        return self.mask.travels(self.ring.source(distance + of_next), distance + 1)


@dataclass
class RingGradients(KeysOnRing):
    """Gradients of keys and values that travel around the ring, one hop behind this rank's work."""

    dtype: torch.dtype
    passing: Tensor | None = None
    home: Tensor | None = None
    messages: Messages = field(default_factory=lambda: Messages(None, Tag.KEY_GRADIENTS, [], []))

    def add(self, distance: int, gradient: Tensor | None) -> None:
        """Add the packed gradients of the keys used at hop `distance` (`mask.needs` says which); None if no keys were used.
        Call it for every hop from 1 on."""
        mask, source, place = self.mask, self.ring.source(distance), self.ring.place
        self.messages.wait()
        before, after = mask.gathered(source, distance - 1), mask.gathered(source, distance)
        total = _sum([(before, self.passing), (mask.needs[source][distance], gradient)], after)
        sends: list[tuple[int, Tensor]] = []
        if total is not None:
            is_last = distance == mask.last_hop(source)
            sends.append((self.ring.rank(source if is_last else place - 1), total))
        receives: list[tuple[int, Tensor]] = []
        self.passing = self._expected(self.ring.source(distance + 1), distance, place + 1, receives, is_home=False)
        home = self._expected(place, distance, place - distance, receives, is_home=True)
        self.home = self.home if home is None else home
        self.messages = Messages(self.ring.group, Tag.KEY_GRADIENTS, sends, receives)

    def received(self) -> Iterator[tuple[Slots, Tensor]]:
        """Gradients that the other ranks have summed for this rank's own keys: pairs of slots and packed gradients."""
        self.messages.wait()
        if self.home is not None:
            yield self.mask.gathered(self.ring.place, self.ring.size - 1), self.home

    def _expected(
        self, source: int, distance: int, sender: int, receives: list[tuple[int, Tensor]], *, is_home: bool
    ) -> Tensor | None:
        """Receive buffer for gradients of keys of `source` that `sender` sends on at hop `distance`; None if they do not come
        here."""
        slots, last = self.mask.gathered(source, distance), self.mask.last_hop(source)
        if slots == NOTHING or (distance != last if is_home else distance >= last):
            return None
        buffer = buffer_for(slots, self.key, self.value, self.dtype)
        receives.append((self.ring.rank(sender), buffer))
        return buffer


def _part(packed: Tensor, keys_values: KeyValueBlock | None, slots: Slots) -> Tensor:
    assert keys_values is not None, "keys that never came cannot go on"
    return packed[slots[0] - keys_values.first : slots[1] - keys_values.first]


def _sum(parts: list[tuple[Slots, Tensor | None]], slots: Slots) -> Tensor | None:
    """Sum of the parts, each at its own slots, over `slots`. May modify and return one of the parts."""
    present = [(span, part) for span, part in parts if part is not None]
    if not present:
        return None
    whole = next((part for span, part in present if span == slots), None)
    total = present[0][1].new_zeros(slots[1] - slots[0], *present[0][1].shape[1:]) if whole is None else whole
    for span, part in present:
        if part is not whole:
            total[span[0] - slots[0] : span[1] - slots[0]] += part
    return total
