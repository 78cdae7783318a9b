"""Rows sent between the ranks of a group, as many from each to each as it takes, none included; with gradients.

    exchange         rows for rank 0, 1, ... go there; what arrives lies in order of the ranks it came from
                     backward: the same with sent and received swapped, for the derivative of moving rows is moving them back
    all_gather       rows of all ranks, in their order, on every rank          backward: reduce_scatter
    reduce_scatter   the sum over ranks of such a whole; each keeps its rows   backward: all_gather
    shard_rows       of rows that all ranks have: this rank's                  backward: rows of all ranks
    unshard_rows     rows of all ranks, which all go on with in the same way   backward: this rank's rows

An exchange can be left under way while something else computes, on the way there and, for its gradient, on the way back:

    depart ---- something else ---- arrive          forward: sent at depart, awaited at arrive
    <- awaited at depart ---- sent at arrive        backward: the engine runs the newest first, so something else is between

Cost on each rank: of P elements there P (n-1)/n are sent, and as many on the way back. Everything is one `all_to_all_single`,
which NCCL and gloo both have with uneven parts (gloo's all-gather and reduce-scatter want equal ones); the sum is taken here,
in order of ranks, so that it is the same bits every time. Price, on CPU alone: `all_gather` copies its rows n times before they
leave.
Not torch's own functional collectives: they allocate wrappers, and wait where autograd wants it.

Exchanges and sums are operations of torch's (`ultrascale::...`), so that selective recomputation can keep their results
(`KEPT_OPS`) and send nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.parallel.lost import waiting
from ultrascale.torch_private import group_named

WORK = "work_that_fills_it"


def all_gather(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[own, D] of every rank to [sum(lengths), D]; the gradient sums what all ranks made of a row."""
    return _AllGather.apply(rows, lengths, group)  # pyright: ignore[reportReturnType]


def reduce_scatter(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[sum(lengths), D] on every rank to this rank's rows of their sum, [own, D]."""
    return _ReduceScatter.apply(rows, lengths, group)  # pyright: ignore[reportReturnType]


def shard_rows(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's shard [own, D] of rows [sum(lengths), D] that are equal on all ranks; so is the gradient."""
    return _ShardRows.apply(rows, lengths, group)  # pyright: ignore[reportReturnType]


def unshard_rows(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[own, D] of every rank to [sum(lengths), D], whose gradient must be the same on all ranks: each takes its rows of it."""
    return _UnshardRows.apply(rows, lengths, group)  # pyright: ignore[reportReturnType]


class TokenExchange:
    """An exchange of `sent[rank]` rows to each rank of `group` for `received[rank]` rows from it."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup):
        self.sent, self.received, self.group = list(sent), list(received), group
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None
        """Also what is sent and what fills: their memory must outlast the messages."""

    def depart(self, rows: Tensor) -> Tensor:
        """Begin to send [sum(sent), D]. The result must be read by nobody but `arrive`."""
        return _Depart.apply(rows, self)  # pyright: ignore[reportReturnType]

    def arrive(self, under_way: Tensor) -> Tensor:
        """[sum(received), D], once it is there."""
        return _Arrive.apply(under_way, self)  # pyright: ignore[reportReturnType]

    def begin(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Memory that fills with rows, sent there or, with `back`, returned."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        rows = rows.contiguous()
        filling = begin_exchange(rows, sent, received, self.group.group_name)
        # The work comes with the tensor, as operations may return tensors only; with a kept result there is none.
        self._under_way = filling.__dict__.pop(WORK, None), rows, filling
        return filling

    def wait(self) -> Tensor:
        """The result of `begin`, complete (on CUDA: when the current stream comes to it)."""
        assert self._under_way is not None, "nothing is under way"
        (work, _, filling), self._under_way = self._under_way, None
        if work is not None:
            with waiting("an exchange of tokens between experts", self.group):
                work.wait()
        return filling


@custom_op("ultrascale::begin_exchange", mutates_args=())
def begin_exchange(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Memory that fills with [sum(received), ...]; the work to wait for is its attribute `WORK`."""
    ranks = group_named(group)
    filling = rows.new_empty(sum(received), *rows.shape[1:])
    with waiting("an exchange of tokens between experts", ranks):
        work = dist.all_to_all_single(filling, rows, received, sent, group=ranks, async_op=True)
    assert work is not None, "this rank is not in the group"
    setattr(filling, WORK, work)
    return filling


@custom_op("ultrascale::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, lengths: list[int], group: str) -> Tensor:
    """This rank's shard of the sum over ranks. Narrow dtypes are added up in fp32 and rounded once."""
    ranks = group_named(group)
    local_length = lengths[ranks.rank()]
    parts = rows.new_empty(ranks.size(), local_length, *rows.shape[1:])
    with waiting("a sum of rows of tokens", ranks):
        dist.all_to_all_single(parts.flatten(0, 1), rows.contiguous(), [local_length] * ranks.size(), lengths, group=ranks)
    total = parts[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for number in range(1, len(parts)):
        total += parts[number]
    del parts  # before the sum is rounded
    return total.to(rows.dtype)


_ops = torch.ops.ultrascale
KEPT_OPS = (_ops.begin_exchange.default, _ops.sum_rows.default)
"""Results that selective recomputation keeps: they came over the network. Gathered rows are as many times as large as there are
ranks, and are gathered again."""


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: Tensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait().view_as(under_way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.begin(grad, back=True)
        return grad, None  # autograd wants a gradient as long as what arrived; what comes back lies in the exchange


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = list(lengths), group
        return _gathered(rows, lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grad, ctx.lengths, ctx.group.group_name), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = list(lengths), group
        return sum_rows(rows, list(lengths), group.group_name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.lengths, ctx.group), None, None


class _ShardRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = list(lengths), group
        return _local_rows(rows, lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(grad, ctx.lengths, ctx.group), None, None


class _UnshardRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = list(lengths), group
        return _gathered(rows, lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _local_rows(grad, ctx.lengths, ctx.group), None, None


def _local_rows(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    first = sum(lengths[: group.rank()])
    return rows[first : first + lengths[group.rank()]].contiguous()


def _gathered(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    gathered = rows.new_empty(sum(lengths), *rows.shape[1:])
    with waiting("a gather of rows of tokens", group):
        if is_cuda(rows):
            dist.all_gather(list(gathered.split(list(lengths))), rows.contiguous(), group=group)
            return gathered
        copies = rows.repeat(group.size(), *(1 for _ in rows.shape[1:]))
        dist.all_to_all_single(gathered, copies, list(lengths), [len(rows)] * group.size(), group=group)
    return gathered
