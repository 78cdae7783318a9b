"""Context parallelism: every sequence is sharded over cp ranks, all of which hold the whole model (or the same shard of it).

    everything else     works on S/cp tokens of each sequence, with their positions in the full sequence
    attention           every query still sees every key: `self_attn.core` and `decoder.make_mask` are replaced
    next targets        of multi-token prediction may be on another rank: `decoder.shift_targets` is replaced

    method              places of the ring    ranks that swap heads    keys and values
    ring                cp                    1                        sent around while attention computes
    all-gather          cp                    1                        all-gathered first
    all-to-all          1                     cp                       all-to-all swaps sequence shards for heads
    ring+all-to-all     cp / cp_heads         cp_heads                 both: all-to-all among neighbours, ring over the rest
                                                                       (Fang and Zhao 2024, "USP")

Rank i of cp has place i // heads in the ring. `work.sharding.context_order` assigns tokens to ranks, by the documents of each
sequence: the trainer shards its batches with `shard_batch`, and masks are built for the same assignment. Weight gradients are
sums over the ranks of cp as over those of dp: data parallelism must sum them over dp x cp (picotron does not where dp is 1).

docs/context-parallelism.md says when to use which method, and what was measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ultrascale.description.layout import Layout
from ultrascale.kernels.attention.flash_packages import MODULES
from ultrascale.models.decoder import Decoder, shift_targets
from ultrascale.parallel.context.context_attention import Setting, ring_attention
from ultrascale.parallel.context.context_masks import (
    ContextMask,
    Documents,
    Rows,
    context_mask,
    document_rows,
    positions_of,
    whole_documents,
)
from ultrascale.parallel.context.context_operation import note, operation
from ultrascale.parallel.context.context_ring import Messages, Ring
from ultrascale.parallel.context.context_swap import Swap, local_heads, to_heads, to_sequence
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.tags import Tag
from ultrascale.work.sharding.context_order import local_pieces, ring_order
from ultrascale.work.sharding.places import even_part

Integers = NDArray[np.int64]


class LocalBatch(NamedTuple):
    """This cp rank's shard of a micro-batch; every field but `document_ids` is [B, S/cp]."""

    tokens: Integers
    targets: Integers
    positions: Integers
    """Positions of the tokens in their documents, for RoPE angles (not slot numbers)."""
    document_ids: Integers | None
    """Document ids of the whole sequences, [B, S]."""
    slots: Integers
    """Position of each token in its sequence."""


class AllMasks(NamedTuple):
    """Masks that `core` takes: built for one micro-batch, shared by layers with the same window."""

    mask: ContextMask
    swapped_lengths: tuple[int, ...]
    """Number of slots of each rank that swaps heads with this one."""
    noted: Tensor | None = None
    """Number under which a compiled block's operation finds the mask (`context_operation`)."""


def apply_context_parallel(decoder: Decoder, layout: Layout, mesh: Mesh, *, compiled: bool = False) -> None:
    """Replace the attention cores and the masks of `decoder`, in place. Does nothing if cp is 1. `compiled`: blocks will be
    compiled."""
    group = mesh.group("cp")
    if group is None:
        return
    context = ContextParallel(layout, group, compiled=compiled)
    core = context.core if compiled else torch.compiler.disable(context.core)  # only the custom operation may be traced
    for _, block in decoder.blocks():
        block.self_attn.core = cast(Any, core)
    decoder.make_mask, decoder.shift_targets = cast(Any, context.make_mask), context.shift_targets


def shard_batch(
    tokens: Integers,
    targets: Integers,
    positions: Integers | None,
    document_ids: Integers | None,
    *,
    layout: Layout,
    cp_rank: int,
) -> LocalBatch:
    """Shard of [B, S] arrays that rank `cp_rank` of cp works on.

    Without `document_ids` each sequence is one stream: masks are causal over all of it, and positions are those in the
    sequence. Pass the result to the decoder: its positions, and the document ids of the whole sequences.
    """
    length = tokens.shape[1]
    slots = local_positions(_rows(document_ids, length, layout.cp_grid[0]), layout, cp_rank)  # [1 or B, S/cp]
    slots = np.broadcast_to(slots, (len(tokens), slots.shape[1]))
    if positions is None or document_ids is None:
        positions = np.broadcast_to(np.arange(length), tokens.shape)
    tokens, targets, positions = (np.take_along_axis(array, slots, axis=1) for array in (tokens, targets, positions))
    return LocalBatch(tokens, targets, positions, document_ids, slots)


def local_positions(rows: Rows, layout: Layout, cp_rank: int) -> Integers:
    """Position in its sequence of each slot's token, [1 or B, S/cp]."""
    heads = layout.cp_grid[1]
    return np.stack([positions_of(local_pieces(order, heads, cp_rank)) for order in rows])


class ContextParallel:
    """Attention of one rank of a cp group."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, *, compiled: bool = False):
        self.layout, self.gathers, self.compiled = layout, layout.cp_method == "all-gather", compiled
        self.package = layout.attention if layout.attention in MODULES else ""
        ring, heads = layout.cp_grid
        place, head_index = divmod(group.rank(), heads)
        self.ring = Ring(group, ring, place, stride=heads, first=head_index)
        self.swap = Swap(group, heads, head_index, first=place * heads)
        self.group = group
        self.slots: list[Integers] = []
        """Slots of the newest masks: for each rank, the position in its sequence of each token, [1 or B, S/cp]."""

    def core(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AllMasks,
        *,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention over all ranks of cp: [B, S/cp, H, E'] from [B, S/cp, H, E], [B, S/cp, K, E] and [B, S/cp, K, E'].

        `sinks` [H]: a score of each head that takes attention weight and has no value. `scale`: 1 / sqrt(E) by default.
        """
        factor = float(query.shape[-1] ** -0.5) if scale is None else scale
        if self.swap.size == 1:
            return self._attend(query, key, value, mask, sinks, factor)
        query, key, value = to_heads(query, key, value, self.swap, mask.swapped_lengths)
        sinks = None if sinks is None else local_heads(sinks, self.swap)
        return to_sequence(self._attend(query, key, value, mask, sinks, factor), self.swap, mask.swapped_lengths)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: AllMasks, sinks: Tensor | None, scale: float
    ) -> Tensor:  # fmt: skip
        if mask.noted is not None:
            return operation(query, key, value, sinks, mask.noted, scale)
        return ring_attention(query, key, value, sinks, self._setting(mask.mask, scale))

    def _setting(self, mask: ContextMask, scale: float) -> Setting:
        return Setting(mask, self.ring, self.gathers, scale, self.package)

    def make_mask(
        self,
        num_queries: int,
        num_keys: int,
        *,
        document_ids: Tensor | Documents | None,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AllMasks:
        """Masks for the tokens that `shard_batch` assigns to the ranks of cp. `num_queries`: number of this rank's slots.

        `document_ids` [B, S] of whole sequences, best as `Documents`, which hold the token order. None: one stream of cp times
        as many tokens as this rank has, divisible by cp. Raises ValueError if the counts are not those of this rank's slots.
        """
        if document_ids is None:
            ids, length = None, num_queries * self.layout.cp
            rows: Rows = (ring_order(length, self.ring.size),)
        else:
            ids, rows = whole_documents(document_ids, self.ring.size)
            length = ids.shape[1]
        mask = context_mask(
            rows, self.ring.place, document_ids=ids, window=None if window is None or window >= length else window, dtype=dtype,
            device=device,
        )  # fmt: skip
        slots = mask.lengths[self.ring.place]
        swapped = tuple(even_part(slots, self.swap.size, place)[1] for place in range(self.swap.size))
        if num_queries != num_keys or num_queries != swapped[self.swap.place]:
            rule = f"cp = {self.layout.cp} gives this rank {swapped[self.swap.place]} of {length} tokens, not {num_queries}"
            raise ValueError(f"{rule}; pass the document ids of whole sequences, and no cache")
        self.slots = [local_positions(rows, self.layout, rank) for rank in range(self.layout.cp)]
        return AllMasks(mask, swapped, note(self._setting(mask, 1.0)) if self.compiled else None)

    def shift_targets(self, targets: Tensor) -> Tensor:
        """Targets of the next position in the sequence, [B, S/cp], for the tokens of the newest masks."""
        parts = [targets.new_empty(len(targets), slots.shape[1]) for slots in self.slots]
        this_rank = self.group.rank()
        others = [rank for rank in range(len(parts)) if rank != this_rank]
        sent = targets.contiguous()
        Messages(self.group, Tag.TARGETS, [(rank, sent) for rank in others], [(rank, parts[rank]) for rank in others]).wait()
        parts[this_rank] = targets
        positions = [torch.from_numpy(slots).to(targets.device).expand(len(targets), -1) for slots in self.slots]
        whole = torch.cat(parts, dim=1)
        whole = torch.empty_like(whole).scatter_(1, torch.cat(positions, dim=1), whole)
        return shift_targets(whole).gather(1, positions[this_rank])


def _rows(document_ids: Integers | None, length: int, ring: int) -> Rows:
    return (ring_order(length, ring),) if document_ids is None else document_rows(document_ids, ring)
