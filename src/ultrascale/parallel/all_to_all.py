"""Differentiable exchanges of rows between the ranks of a group, with any number of rows (zero included) per pair of ranks.

    exchange         rows for rank 0, 1, ... are sent there; received rows lie in order of their source ranks
                     backward: an exchange with sent and received swapped
    all_gather       rows of all ranks, in rank order, on every rank        backward: reduce_scatter
    reduce_scatter   the sum over ranks; each rank keeps its rows           backward: all_gather
    shard_rows       this rank's shard of rows that all ranks have          backward: all rows
    unshard_rows     rows of all ranks, used identically on every rank      backward: this rank's rows

An exchange can stay in flight while other work runs, in the forward pass and, for its gradient, in the backward pass:

    depart ---- other work ---- arrive              forward: sent at depart, awaited at arrive
    <- awaited at depart ---- sent at arrive        backward: autograd runs the newest node first, so other work is between

Cost per rank: of P elements, P (n-1)/n are sent, and as many in the backward pass. Everything is one `all_to_all_single`, which
NCCL and gloo both support with uneven parts (gloo's all-gather and reduce-scatter need equal ones). The sum is taken here, in
rank order, so that its bits are reproducible. The price, on CPU only: `all_gather` copies its rows n times before they are
sent. Torch's functional collectives are not used: they allocate wrapper tensors, and autograd decides where they wait.

Exchanges and sums are custom torch operations (`ultrascale::...`), so that selective recomputation can save their results
(`KEPT_OPS`) and does not communicate again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import custom_op

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.parallel.lost import waiting
from ultrascale.torch_private import group_named

WORK = "work_that_fills_it"
Move = Callable[[Tensor, list[int], dist.ProcessGroup], Tensor]


def all_gather(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[n, D] of every rank to [sum(lengths), D]; the gradient of a row is summed over all ranks."""
    return _Moved.apply(rows, _gathered, _summed, lengths, group)  # pyright: ignore[reportReturnType]


def reduce_scatter(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[sum(lengths), D] on every rank to this rank's rows of their sum, [n, D]."""
    return _Moved.apply(rows, _summed, _gathered, lengths, group)  # pyright: ignore[reportReturnType]


def shard_rows(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """This rank's shard [n, D] of rows [sum(lengths), D] that are equal on all ranks; the gradient is equal on all ranks
    too."""
    return _Moved.apply(rows, _local_rows, _gathered, lengths, group)  # pyright: ignore[reportReturnType]


def unshard_rows(rows: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[n, D] of every rank to [sum(lengths), D]. The gradient must be the same on all ranks: each takes its own rows of it."""
    return _Moved.apply(rows, _gathered, _local_rows, lengths, group)  # pyright: ignore[reportReturnType]


class TokenExchange:
    """Exchange that sends `sent[rank]` rows to each rank of `group` and receives `received[rank]` rows from it."""

    def __init__(self, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup):
        self.sent, self.received, self.group = list(sent), list(received), group
        self._under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None
        """The work, the rows sent and the rows being received: their memory must outlive the messages."""

    def depart(self, rows: Tensor) -> Tensor:
        """Start to send [sum(sent), D]. Only `arrive` may read the result."""
        return _Depart.apply(rows, self)  # pyright: ignore[reportReturnType]

    def arrive(self, under_way: Tensor) -> Tensor:
        """Wait for and return [sum(received), D]."""
        return _Arrive.apply(under_way, self)  # pyright: ignore[reportReturnType]

    def begin(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Start the exchange; returns the receive buffer. `back`: send rows back to their sources."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        rows = rows.contiguous()
        filling = begin_exchange(rows, sent, received, self.group.group_name)
        # The work is an attribute of the tensor, as operations may return tensors only; a saved result has none.
        self._under_way = filling.__dict__.pop(WORK, None), rows, filling
        return filling

    def wait(self) -> Tensor:
        """The result of `begin`, complete (on CUDA: the current stream waits for it)."""
        assert self._under_way is not None, "nothing is under way"
        (work, _, filling), self._under_way = self._under_way, None
        if work is not None:
            with waiting("an exchange of tokens between experts", self.group):
                work.wait()
        return filling


@custom_op("ultrascale::begin_exchange", mutates_args=())
def begin_exchange(rows: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Start an exchange; returns the receive buffer [sum(received), ...]. The work to wait for is its attribute `WORK`."""
    ranks = group_named(group)
    filling = rows.new_empty(sum(received), *rows.shape[1:])
    with waiting("an exchange of tokens between experts", ranks):
        work = dist.all_to_all_single(filling, rows, received, sent, group=ranks, async_op=True)
    assert work is not None, "this rank is not in the group"
    setattr(filling, WORK, work)
    return filling


@custom_op("ultrascale::sum_rows", mutates_args=())
def sum_rows(rows: Tensor, lengths: list[int], group: str) -> Tensor:
    """This rank's shard of the sum over ranks. 16-bit dtypes are summed in fp32 and rounded once."""
    ranks = group_named(group)
    local_length = lengths[ranks.rank()]
    parts = rows.new_empty(ranks.size(), local_length, *rows.shape[1:])
    with waiting("a sum of rows of tokens", ranks):
        dist.all_to_all_single(parts.flatten(0, 1), rows.contiguous(), [local_length] * ranks.size(), lengths, group=ranks)
    total = parts[0].to(wide_dtype(rows), copy=True)
    for number in range(1, len(parts)):
        total += parts[number]
    del parts  # before the sum is rounded
    return total.to(rows.dtype)


_ops = torch.ops.ultrascale
KEPT_OPS = (_ops.begin_exchange.default, _ops.sum_rows.default)
"""Operations whose results selective recomputation saves: they were communicated. All-gathered rows are not saved, as they are
n times as large; they are gathered again."""


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
        return grad, None  # autograd wants a gradient of the shape received; the returned rows are in the exchange


class _Moved(torch.autograd.Function):
    """Rows moved by `move`; their gradient is moved by `back`, its transpose."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move, back: Move, lengths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.lengths, ctx.group = back, list(lengths), group
        return move(rows, ctx.lengths, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.lengths, ctx.group), None, None, None, None


def _summed(rows: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    return sum_rows(rows, lengths, group.group_name)


def _local_rows(rows: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    first = sum(lengths[: group.rank()])
    return rows[first : first + lengths[group.rank()]].contiguous()


def _gathered(rows: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    gathered = rows.new_empty(sum(lengths), *rows.shape[1:])
    with waiting("a gather of rows of tokens", group):
        if is_cuda(rows):
            dist.all_gather(list(gathered.split(lengths)), rows.contiguous(), group=group)
            return gathered
        copies = rows.repeat(group.size(), *(1 for _ in rows.shape[1:]))
        dist.all_to_all_single(gathered, copies, lengths, [len(rows)] * group.size(), group=group)
    return gathered
