"""Ulysses all-to-all: ranks that each hold a shard of a sequence exchange it for the whole sequence of some heads, and swap
back afterwards.

    [B, S/n, H, E] of every head    --one message to each other rank-->    [B, S, H/n, E] of this rank's heads

(Jacobs et al. 2023, "DeepSpeed-Ulysses".) Queries, keys and values share one message, so a layer swaps twice forward and twice
backward, sending (n-1)/n of a rank's tensors each time. That is less than a ring sends once n exceeds a few, but none of it
overlaps with computation. The attention between the swaps is ordinary attention, with any kernel and mask. n must divide the
query heads. A rank receives the key/value heads that its queries read; where n does not divide them some go to several ranks,
and their gradients add up.

Why not all_to_all_single: the ranks that swap may be a subset of a group (a ring joins the others), and each subset would need
its own process group; NCCL's own all-to-all is made of the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from ultrascale.parallel.context.context_ring import Messages
from ultrascale.parallel.tags import Tag
from ultrascale.torch_private import group_named


class Swap(NamedTuple):
    """Set of `size` consecutive ranks of a group that swap, starting at `first`; this rank is the `place`-th."""

    group: dist.ProcessGroup | None
    size: int
    place: int
    first: int = 0


def to_heads(query: Tensor, key: Tensor, value: Tensor, swap: Swap, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, H/n, E], [B, S, K', E] and [B, S, K', E'] of all slots, from [B, S/n, H, E], [B, S/n, K, E] and [B, S/n, K, E'].

    `lengths`: slots of each rank. K' is K/n, or the number of key/value heads that this rank's query heads read. n must divide
    H.
    """
    heads = query.shape[2] // swap.size
    read = _heads_read(query.shape[2], key.shape[2], swap.size)
    if read is not None:
        chosen = torch.tensor(read, device=key.device)
        key, value = key.index_select(2, chosen), value.index_select(2, chosen)
    sizes = [heads * query.shape[3], key.shape[2] // swap.size * key.shape[3], value.shape[2] // swap.size * value.shape[3]]
    packed = torch.cat([_by_rank(x, swap.size) for x in (query, key, value)], dim=-1).flatten(0, 1)  # [n S/n, B, features]
    local_lengths = [query.shape[1]] * swap.size
    swapped = _Swapped.apply(packed, local_lengths, list(lengths), swap)
    assert isinstance(swapped, Tensor)
    widths = (query.shape[3], key.shape[3], value.shape[3])
    query, key, value = (
        part.unflatten(-1, (-1, width)).transpose(0, 1)
        for part, width in zip(swapped.split(sizes, dim=-1), widths, strict=True)
    )
    return query, key, value


def to_sequence(out: Tensor, swap: Swap, lengths: Sequence[int]) -> Tensor:
    """[B, S/n, H, E] of this rank's slots, contiguous, from [B, S, H/n, E] of its heads.

    Contiguous on every rank, so that [B, S/n, H*E] is a view whatever the number of slots: if recomputation frees the result,
    all ranks then rerun the same messages.
    """
    batch, _, heads, width = out.shape
    local_length = lengths[swap.place]
    swapped = _Swapped.apply(out.transpose(0, 1).flatten(2), list(lengths), [local_length] * swap.size, swap)
    assert isinstance(swapped, Tensor)
    by_rank = swapped.view(swap.size, local_length, batch, heads, width)
    return by_rank.permute(2, 1, 0, 3, 4).contiguous().flatten(2, 3)


def local_heads(values: Tensor, swap: Swap) -> Tensor:
    """This rank's shard of per-head numbers, [H] to [H/n]."""
    return values.unflatten(0, (swap.size, -1))[swap.place]


def _heads_read(heads: int, groups: int, ranks: int) -> list[int] | None:
    """Key/value heads in the order in which they are sent, equally many to each rank; None for all of them in order.

    Query head h reads head h // (heads / groups). A rank whose queries read whole groups, or one group, receives each head
    once.
    """
    if groups % ranks == 0:
        return None
    per_rank = heads // ranks if ranks % groups else 1
    step = heads // ranks // per_rank
    return [(rank * (heads // ranks) + i * step) * groups // heads for rank in range(ranks) for i in range(per_rank)]


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Split heads [B, S/n, H, E] by destination rank: [n, S/n, B, features]."""
    return x.unflatten(2, (ranks, -1)).permute(2, 1, 0, 3, 4).contiguous().flatten(3)


class _Swapped(torch.autograd.Function):
    """All-to-all along dim 0: parts of `send_sizes` go to the ranks in order, parts of `receive_sizes` come from them. Backward
    is the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send_sizes: list[int], receive_sizes: list[int], swap: Swap) -> Tensor:
        ctx.send_sizes, ctx.receive_sizes, ctx.swap = send_sizes, receive_sizes, swap
        return _exchanged(x, send_sizes, receive_sizes, swap)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchanged(grads[0], ctx.receive_sizes, ctx.send_sizes, ctx.swap), None, None, None


@custom_op("ultrascale::swap_sequence", mutates_args=())
def swap_sequence(
    x: Tensor, send_sizes: list[int], receive_sizes: list[int], group: str, size: int, place: int, first: int
) -> Tensor:
    """`_exchange` as one node of a compiled graph."""
    return _exchange(x, send_sizes, receive_sizes, Swap(group_named(group), size, place, first))


@swap_sequence.register_fake
def _(x: Tensor, send_sizes: list[int], receive_sizes: list[int], *rest: Any) -> Tensor:
    return x.new_empty(sum(receive_sizes), *x.shape[1:])


def _exchanged(x: Tensor, send_sizes: list[int], receive_sizes: list[int], swap: Swap) -> Tensor:
    if not torch.compiler.is_compiling():
        return _exchange(x, send_sizes, receive_sizes, swap)
    assert swap.group is not None
    return swap_sequence(x, send_sizes, receive_sizes, swap.group.group_name, swap.size, swap.place, swap.first)


def _exchange(x: Tensor, send_sizes: list[int], receive_sizes: list[int], swap: Swap) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(sum(receive_sizes), *x.shape[1:])
    sent, received = x.split(send_sizes), out.split(receive_sizes)
    others = [place for place in range(swap.size) if place != swap.place]
    messages = Messages(
        swap.group, Tag.SWAP,
        [(swap.first + place, sent[place]) for place in others], [(swap.first + place, received[place]) for place in others],
    )  # fmt: skip
    received[swap.place].copy_(sent[swap.place])
    messages.wait()
    return out
