"""All-gather context parallelism: every rank gathers all keys and values before it computes, in the forward and again in the
backward pass.

In the backward pass the gradients of each rank's keys are then sent to it and summed there: a reduce-scatter (Llama 3, section
3.3.2). A rank sends as much as on a ring, without overlap, and keys and values of the whole sequence (in the backward pass
their gradients too) are in memory for one layer; in exchange there is one collective instead of n - 1 hops.

On CUDA, NCCL's collectives are used if all ranks have equally many slots. Otherwise every rank sends a message to every other,
with gradients only of slots that the sender touched: gloo's all-gather copies everything once more, its reduce-scatter sends
twice as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.parallel.context.context_masks import NOTHING, ContextMask, Slots
from ultrascale.parallel.context.context_ring import KeysOnRing, KeyValueBlock, Messages, buffer_for, pack, unpack
from ultrascale.parallel.tags import Tag


def runs_collectives(key: Tensor, mask: ContextMask) -> bool:
    """True if the parts are equal and the backend has efficient collectives."""
    return is_cuda(key) and len(set(mask.lengths)) == 1


class GatheredKeys(KeysOnRing):
    """All keys and values, gathered at once."""

    def hops(self) -> Iterator[KeyValueBlock | None]:
        """This rank's own keys and values, then those of every other rank, in the order of a ring."""
        packed = self._gathered()
        yield KeyValueBlock(self.key, self.value, 0)
        for distance in range(1, self.ring.size):
            yield KeyValueBlock(*unpack(packed[self.ring.source(distance)], self.key.shape[-1]), 0)

    def _gathered(self) -> list[Tensor]:
        """Packed keys and values of every rank of the group."""
        packed, ring = pack(self.key, self.value), self.ring
        whole = buffer_for((0, sum(self.mask.lengths)), self.key, self.value, packed.dtype)
        parts = list(whole.split(self.mask.lengths))
        if runs_collectives(self.key, self.mask):
            dist.all_gather_into_tensor(whole, packed, group=ring.group)
            return parts
        others = [ring.source(distance) for distance in range(1, ring.size)]
        receives = [(ring.rank(place), parts[place]) for place in others]
        Messages(ring.group, Tag.KEYS, [(ring.rank(place), packed) for place in others], receives).wait()
        return parts


@dataclass
class ScatteredGradients(KeysOnRing):
    """Gradients of keys and values, collected until all are computed and then reduce-scattered."""

    dtype: torch.dtype
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def add(self, distance: int, gradient: Tensor | None) -> None:
        """Add the packed gradients of the keys used at hop `distance` (`mask.needs` says which); None if no keys were used."""
        if gradient is not None:
            self.gradients[distance] = gradient

    def received(self) -> Iterator[tuple[Slots, Tensor]]:
        """Gradients that other ranks computed for this rank's own keys: pairs of slots and packed gradients."""
        if runs_collectives(self.key, self.mask):
            yield self._reduced()
            return
        mask, ring = self.mask, self.ring
        needs = {d: mask.needs[ring.place][d] for d in range(1, ring.size) if mask.needs[ring.place][d] != NOTHING}
        buffers = {d: buffer_for(slots, self.key, self.value, self.dtype) for d, slots in needs.items()}
        sends = [(ring.rank(ring.source(d)), gradient) for d, gradient in self.gradients.items()]
        Messages(
            ring.group, Tag.KEY_GRADIENTS, sends, [(ring.rank(ring.place - d), buffer) for d, buffer in buffers.items()]
        ).wait()
        for distance, buffer in buffers.items():
            yield needs[distance], buffer

    def _reduced(self) -> tuple[Slots, Tensor]:
        length = self.mask.lengths[0]
        whole = buffer_for((0, length * self.ring.size), self.key, self.value, self.dtype).zero_()
        for distance, gradient in self.gradients.items():
            source = self.ring.source(distance)
            first, stop = self.mask.needs[source][distance]
            whole[source * length + first : source * length + stop] = gradient
        reduced = buffer_for((0, length), self.key, self.value, self.dtype)
        dist.reduce_scatter_tensor(reduced, whole, group=self.ring.group)
        return (0, length), reduced
