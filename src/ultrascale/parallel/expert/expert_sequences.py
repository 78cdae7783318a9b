"""Expert capacity when a sequence's tokens are spread over ranks: which choices are dropped.

Capacity is defined per whole sequence: to drop what one process would drop, a rank needs the choices of all tokens of the
sequence. Each rank of tp (with sequence parallelism) and of cp contributes its own, in the order in which it holds them. All of
them reorder the choices by sequence position, make the same decision, and keep the answer for their own tokens.

    ranks hold     0 1 6 7 | 2 3 4 5          slots, in zigzag order of two ranks of cp
    in sequence    0 1 2 3 4 5 6 7            ties between equal weights go to the earlier token

A rank receives 8 B S k bytes a layer (fp32): little beside its B S k D / (tp cp) elements of tokens. Not taken: deciding from
local tokens only, as other frameworks do, which drops different tokens under each layout.

Token positions are passed along with the mask that each block is given: a block recomputed in the backward pass, after other
micro-batches have run, still gets its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import moe_layers
from ultrascale.models.router import drop_over_capacity
from ultrascale.parallel.all_to_all import all_gather
from ultrascale.parallel.context.context_masks import whole_documents
from ultrascale.parallel.context.context_parallel import local_positions
from ultrascale.work.sharding.context_order import ring_order
from ultrascale.work.sharding.places import even_part


class Placed(NamedTuple):
    """A mask, and the sequence positions of the tokens of each rank of cp: [1 or B, S/cp] int64 each."""

    mask: Any
    positions: list[Tensor]


def apply_whole_sequences(decoder: Decoder, sequences: WholeSequences) -> None:
    """Make experts of limited capacity drop what one process would drop, in place. Call it after context parallelism has
    replaced the masks, and before blocks are wrapped for recomputation."""
    decoder.make_mask = partial(sequences.make_mask, decoder.make_mask)  # pyright: ignore[reportAttributeAccessIssue]
    for _, block in decoder.blocks():
        block.forward = partial(sequences.enter, block.forward)  # pyright: ignore[reportAttributeAccessIssue]
    for _, layer in moe_layers(decoder):
        layer.router.keep = sequences.keep


@dataclass
class WholeSequences:
    """Ranks that hold the tokens of the same sequences. `tp`: its group with sequence parallelism, else None."""

    layout: Layout
    cp: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    positions: list[Tensor] = field(default_factory=list)

    def make_mask(self, inner: Callable[..., Any], num_queries: int, *others: Any, **options: Any) -> Placed:
        """The decoder's `make_mask`: the mask of `inner`, together with the tokens' positions."""
        mask = inner(num_queries, *others, **options)
        if self.cp is None:
            return Placed(mask, [torch.arange(num_queries, device=options["device"])[None]])
        ids, ring = options["document_ids"], self.layout.cp_grid[0]
        whole = num_queries * self.cp.size()
        rows = (ring_order(whole, ring),) if ids is None else whole_documents(ids, ring).rows
        positions = [local_positions(rows, self.layout, rank) for rank in range(self.cp.size())]
        return Placed(mask, [torch.from_numpy(of_rank).to(options["device"]) for of_rank in positions])

    def enter(self, forward: Callable[..., Tensor], hidden: Tensor, angles: Any, placed: Placed, *rest: Any) -> Tensor:
        """A block's `forward` with the tokens' positions set."""
        self.positions = placed.positions
        return forward(hidden, angles, placed.mask, *rest)

    @torch.no_grad()
    def keep(self, chosen: Tensor, weights: Tensor, num_experts: int, factor: float) -> Tensor:
        """Mask of the choices of this rank's tokens that are kept, [B, S/(tp cp), k]."""
        choices = chosen.shape[2]
        local = torch.cat((chosen.to(weights.dtype), weights), 2).transpose(0, 1)  # [S/(tp cp), B, 2 k]
        gathered = self._gather(local).transpose(0, 1)  # [B, S, 2 k]
        where = torch.cat([of_rank.expand(len(chosen), -1) for of_rank in self.positions], 1)  # [B, S]
        placed = torch.empty_like(gathered).scatter_(1, where[..., None].expand_as(gathered), gathered)
        kept = drop_over_capacity(placed[..., :choices].long(), placed[..., choices:], num_experts, factor)
        positions = self._local_positions().expand(len(chosen), -1)
        return kept.gather(1, positions[..., None].expand_as(chosen))

    def _gather(self, local: Tensor) -> Tensor:
        """Gather the shards of all ranks, ordered by cp and then tp rank: local [S/(tp cp), ...] to [S, ...]."""
        place = 0 if self.cp is None else self.cp.rank()
        if self.tp is not None:
            length, ranks = self.positions[place].shape[1], self.tp.size()
            local = all_gather(local, [even_part(length, ranks, rank)[1] for rank in range(ranks)], self.tp)
        return local if self.cp is None else all_gather(local, [of_rank.shape[1] for of_rank in self.positions], self.cp)

    def _local_positions(self) -> Tensor:
        """Sequence positions of this rank's tokens, [1 or B, S/(tp cp)]."""
        positions = self.positions[0 if self.cp is None else self.cp.rank()]
        if self.tp is None:
            return positions
        first, length = even_part(positions.shape[1], self.tp.size(), self.tp.rank())
        return positions[:, first : first + length]
