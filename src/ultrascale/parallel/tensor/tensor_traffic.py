"""Communication of tensor parallelism: all-gather, reduce-scatter and all-reduce of sequences.

    all_gather_sequence       [B, S/tp, D] of every rank -> [B, S, D] on every rank             a rank sends (tp-1)/tp of B S D
    reduce_scatter_sequence   [B, S, D] of every rank -> [B, S/tp, D] of their sum              as much
    all_reduce                [B, S, D] of every rank -> their sum on every rank                twice that

Shards are those of `torch.tensor_split`: as even as possible, longer ones first, so tp need not divide a sequence. Each
function only starts its messages and returns a function that waits for them, so that GEMMs overlap. On CPU every rank writes to
every other (`parallel.data.collectives`): two ranks add each other's tensors after one message, where gloo's ring takes two; on
CUDA NCCL does it, and even shards of one sequence need no further copy. Sums are taken in rank order, so that every rank has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.parallel.data.collectives import PendingExchange
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.tags import Tag
from ultrascale.work.sharding.places import even_part

_PAIR = 2
"""Ranks up to which each sends its whole tensor and adds the other's: with more ranks, exchanging parts sends less."""

Finish = Callable[[], Tensor]
"""Function that waits for the messages and returns their result."""


def shard_lengths(length: int, group: dist.ProcessGroup) -> list[int]:
    """Number of positions of a sequence of `length` on each rank."""
    return [even_part(length, group.size(), rank)[1] for rank in range(group.size())]


def all_gather_sequence(part: Tensor, length: int, group: dist.ProcessGroup) -> Finish:
    """Start an all-gather of [B, S/tp, ...] to [B, S, ...], S = `length`.

    Raises ValueError if this rank's part does not have the size it has in a sequence of that length.
    """
    lengths, this_rank = shard_lengths(length, group), group.rank()
    if part.shape[1] != lengths[this_rank]:
        rule = f"rank {this_rank} of {len(lengths)} has {part.shape[1]} positions of a sequence"
        raise ValueError(f"{rule} of {length}, which gives it {lengths[this_rank]}")
    part = part.contiguous()
    if has_collectives(part) and len(set(lengths)) == 1:
        together = part.new_empty(len(lengths), *part.shape)  # [tp, B, S/tp, ...]; of one sequence [1, S, ...] is a view of it
        work = dist.all_gather_into_tensor(together.flatten(0, 1), part, group=group, async_op=True)
        return _then(lambda: together.transpose(0, 1).flatten(1, 2), work, group)
    pieces = [
        part if rank == this_rank else part.new_empty(part.shape[0], n, *part.shape[2:]) for rank, n in enumerate(lengths)
    ]
    if has_collectives(part):
        pieces[this_rank] = torch.empty_like(part)
        return _then(lambda: torch.cat(pieces, dim=1), dist.all_gather(pieces, part, group=group, async_op=True), group)
    work = PendingExchange([part] * len(pieces), pieces, group, Tag.SEQUENCE_PARTS)
    return _then(lambda: torch.cat(pieces, dim=1), work, group)


def reduce_scatter_sequence(whole: Tensor, group: dist.ProcessGroup) -> Finish:
    """Start a reduce-scatter of [B, S, ...]: each rank keeps its part of the sequence."""
    lengths, this_rank = shard_lengths(whole.shape[1], group), group.rank()
    pieces = list(whole.split(lengths, dim=1))
    if has_collectives(whole):
        total = _like(pieces[this_rank])
        if len(set(lengths)) == 1:
            by_rank = whole.unflatten(1, (len(lengths), -1)).transpose(0, 1)  # [tp, B, S/tp, ...]; of one sequence: a view
            together = by_rank.flatten(0, 1).contiguous()
            return _then(lambda: total, dist.reduce_scatter_tensor(total, together, group=group, async_op=True), group)
        sent = [piece.contiguous() for piece in pieces]
        return _then(lambda: total, dist.reduce_scatter(total, sent, group=group, async_op=True), group)
    sent = [piece if rank == this_rank else piece.contiguous() for rank, piece in enumerate(pieces)]
    received = [pieces[this_rank] if rank == this_rank else _like(pieces[this_rank]) for rank in range(len(pieces))]
    return _then(lambda: _add(received), PendingExchange(sent, received, group, Tag.SEQUENCE_SUMS), group)


def all_reduce(whole: Tensor, group: dist.ProcessGroup) -> Finish:
    """Start an all-reduce. `whole` may be overwritten."""
    whole = whole.contiguous()
    if has_collectives(whole) or group.size() > _PAIR:
        return _then(lambda: whole, dist.all_reduce(whole, group=group, async_op=True), group)
    received = [whole if rank == group.rank() else torch.empty_like(whole) for rank in range(_PAIR)]
    return _then(lambda: _add(received), PendingExchange([whole] * _PAIR, received, group, Tag.SEQUENCE_SUMS), group)


def sum_sequence(whole: Tensor, length: int, group: dist.ProcessGroup) -> Finish:
    """Start a sum over ranks: a reduce-scatter, or where `length` is 0 an all-reduce."""
    return reduce_scatter_sequence(whole, group) if length else all_reduce(whole, group)


def all_gather_stacked(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Blocking all-gather of a small tensor, stacked: [...] to [tp, ...]."""
    if has_collectives(local):
        together = local.new_empty(group.size(), *local.shape)
        work = dist.all_gather_into_tensor(together.flatten(0, 1), local.contiguous(), group=group, async_op=True)
        return _then(lambda: together, work, group)()
    pieces = [local if rank == group.rank() else torch.empty_like(local) for rank in range(group.size())]
    return _then(
        lambda: torch.stack(pieces), PendingExchange([local] * len(pieces), pieces, group, Tag.SEQUENCE_PARTS), group
    )()


def has_collectives(tensor: Tensor) -> bool:
    """True if the backend has efficient collectives (NCCL); gloo's copy, or send more than needed."""
    return is_cuda(tensor)


def _then(result: Finish, work: dist.Work | None, group: dist.ProcessGroup) -> Finish:
    def finish() -> Tensor:
        assert work is not None
        with waiting("a collective over tp", group):
            work.wait()
        return result()

    return finish


def _like(piece: Tensor) -> Tensor:
    return torch.empty_like(piece, memory_format=torch.contiguous_format)


def _add(parts: Sequence[Tensor]) -> Tensor:
    """Sum of the parts, in new memory."""
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total += part
    return total
