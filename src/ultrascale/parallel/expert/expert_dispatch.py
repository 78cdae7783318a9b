"""Dispatch and combine: sends tokens to the ranks of their experts, and results back.

    tokens [N, D]        each rank's own; without sequence parallelism all tp ranks hold the same, and each takes a part
      | spread           a row for each (token, expert) pair, in the order of experts: R of N k, less the dropped ones
      | ep: exchange     rows go to the ranks of their experts; their counts are exchanged first, in a message of X integers
      | expert_tp: all_gather  ranks that shard the same experts' F gather each other's rows
      | by expert        rows of all sources, grouped by expert for one grouped GEMM per weight
    experts              X/ep experts, F/expert_tp of each
      | expert_tp: reduce_scatter, ep: exchange back, weighted sum, unshard_rows over tp      back at the token's rank

Communication per layer and rank, in elements of D per direction, with balanced experts: N k (ep-1)/ep over ep and N k
(expert_tp-1) over expert_tp; dispatch and combine, forward and backward: four times that. Exchanging first and gathering
afterwards sends each row once over ep, the slower network; gathering tokens before they are copied k times would send less only
if k exceeds ep. The host waits once per layer, for the row counts: this avoids dropping or padding.

`start` leaves rows in flight while shared experts compute. Nothing is scaled: losses and gradients are sums over tokens, and an
expert's gradient is complete once it has processed all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels.expert_rows import spread, weighted_sum
from ultrascale.parallel.all_to_all import TokenExchange, all_gather, reduce_scatter, shard_rows, unshard_rows
from ultrascale.work.sharding.places import even_part

Experts = Callable[[Tensor, Tensor], Tensor]
"""Function from rows [R, D], grouped by expert, and the number of rows of each local expert, [X/ep] int64, to results [R,
D]."""


class ExpertDispatch:
    """The `dispatch` of an MoE layer under expert parallelism. A group of None stands for a single rank."""

    def __init__(
        self,
        num_experts: int,
        *,
        ep: dist.ProcessGroup | None = None,
        expert_tp: dist.ProcessGroup | None = None,
        same_tokens: dist.ProcessGroup | None = None,
    ):
        """`num_experts`: experts of the layer, X. `same_tokens`: the group of tp, if all its ranks hold the same tokens."""
        self.num_experts, self.ep, self.expert_tp, self.same_tokens = num_experts, ep, expert_tp, same_tokens
        ranks = 1 if ep is None else ep.size()
        firsts = [even_part(num_experts, ranks, rank)[0] for rank in range(ranks)]
        self.bounds = [*firsts, num_experts]
        """First expert of each rank of ep, then X."""

    def __call__(self, tokens: Tensor, routing: tuple[Tensor, Tensor], experts: Experts) -> Tensor:
        """Expert outputs of tokens [N, D], summed per token with its routing weights: [N, D]."""
        return self.finish(self.start(tokens, routing), experts)

    def start(self, tokens: Tensor, routing: tuple[Tensor, Tensor]) -> UnderWay:
        """Start sending tokens [N, D] to their experts, [N, k] int64, with the routing weights [N, k].

        An expert number >= X marks a dropped pair, which is not sent.
        """
        chosen, weights = routing
        lengths: list[int] = []
        if (group := self.same_tokens) is not None:
            lengths = [even_part(len(tokens), group.size(), rank)[1] for rank in range(group.size())]
            tokens, weights = shard_rows(tokens, lengths, group), shard_rows(weights, lengths, group)
            chosen = chosen.split(lengths)[group.rank()]
        flat = chosen.flatten()
        sent = torch.bincount(flat, minlength=self.num_experts)[: self.num_experts]
        arriving = self._agree(sent)  # [expert_tp, ep, X/ep]
        to_expert, from_rank = _to_host(sent, arriving.sum(2))
        pairs = flat.argsort(stable=True)[: sum(to_expert)]
        rows = spread(tokens, pairs, chosen.shape[1])
        under_way = UnderWay(rows, pairs, weights, arriving, from_rank, lengths)
        if self.ep is not None:
            tp_rank = 0 if self.expert_tp is None else self.expert_tp.rank()
            sizes = [sum(to_expert[first:end]) for first, end in pairwise(self.bounds)]
            under_way.exchange = TokenExchange(sizes, from_rank[tp_rank], self.ep)
            under_way.rows = under_way.exchange.depart(rows)
        return under_way

    def finish(self, under_way: UnderWay, experts: Experts) -> Tensor:
        """Compute the experts on the received rows, and return the combined results to the tokens' ranks: [N, D]."""
        exchange = under_way.exchange
        rows = self._compute(self._arrived(under_way), under_way, experts)
        if exchange is not None:
            home = TokenExchange(exchange.received, exchange.sent, exchange.group)
            rows = home.arrive(home.depart(rows))
        tokens = weighted_sum(rows, under_way.pairs, under_way.weights)
        return tokens if self.same_tokens is None else unshard_rows(tokens, under_way.lengths, self.same_tokens)

    def _arrived(self, under_way: UnderWay) -> Tensor:
        """The received rows; the caller holds the only reference."""
        rows, under_way.rows = under_way.rows, None
        assert rows is not None, "they were taken before"
        return rows if under_way.exchange is None else under_way.exchange.arrive(rows)

    def _compute(self, rows: Tensor, under_way: UnderWay, experts: Experts) -> Tensor:
        """Results of rows ordered by source and expert, in the same order. The name `rows` always holds the only reference, so
        that each tensor is freed early."""
        arriving, lengths = under_way.arriving, [sum(sizes) for sizes in under_way.from_rank]
        if self.expert_tp is not None:
            rows = all_gather(rows, lengths, self.expert_tp)
        counts = arriving.sum((0, 1))
        if arriving.shape[:2].numel() == 1:
            rows = experts(rows, counts)
        else:
            order = order_by_expert(arriving, len(rows))
            rows = reorder(rows, order)
            rows = experts(rows, counts)
            rows = put_back(rows, order)
        return rows if self.expert_tp is None else reduce_scatter(rows, lengths, self.expert_tp)

    def _agree(self, sent: Tensor) -> Tensor:
        """Exchange counts: from the rows that this rank sends to each expert, [X], to those it receives, [expert_tp, ep, X/ep],
        including rows that will be gathered from the other ranks of expert_tp."""
        arriving = sent
        if self.ep is not None:
            sizes = [end - first for first, end in pairwise(self.bounds)]
            num_local = sizes[self.ep.rank()]
            numbers = TokenExchange(sizes, [num_local] * len(sizes), self.ep)
            numbers.begin(sent)
            arriving = numbers.wait().view(len(sizes), num_local)
        if self.expert_tp is None:
            return arriving.view(1, -1, arriving.shape[-1])
        ranks = self.expert_tp.size()
        return all_gather(arriving.view(1, -1), [1] * ranks, self.expert_tp).view(ranks, -1, arriving.shape[-1])


@dataclass
class UnderWay:
    """Rows in flight, with the metadata to combine their results."""

    rows: Tensor | None
    """Rows to send; None once they have been taken."""
    pairs: Tensor
    """Index of the (token, choice) of each sent row, [R] int64."""
    weights: Tensor
    """Routing weights of this rank's tokens, [N, k]."""
    arriving: Tensor
    """Number of rows for each local expert, by sending rank: [expert_tp, ep, X/ep] int64."""
    from_rank: list[list[int]]
    """Number of rows from each rank (sums over experts), on the host."""
    lengths: list[int]
    """Number of tokens of each tp rank if all hold the same tokens; else empty."""
    exchange: TokenExchange | None = None


def _to_host(sent: Tensor, from_rank: Tensor) -> tuple[list[int], list[list[int]]]:
    """Both tensors as Python integers, in one device-to-host copy."""
    numbers = torch.cat([sent, from_rank.flatten()]).tolist()
    width: int = from_rank.shape[1]
    rest: Sequence[int] = numbers[len(sent) :]
    return numbers[: len(sent)], [list(rest[first : first + width]) for first in range(0, len(rest), width)]


def order_by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """Indices [R] int64 that reorder rows from (source, expert) order, with counts [..., X], into expert order.

    received     rank 0: e0 e0 e1 | rank 1: e0 e1 e1 e1            counts [[2, 1], [1, 3]]
    by expert    e0 e0 e0 e1 e1 e1 e1                              within an expert still by source
    """
    expert = torch.arange(counts.shape[-1], device=counts.device).expand_as(counts).flatten()
    return expert.repeat_interleave(counts.flatten(), output_size=num_rows).argsort(stable=True)


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """Permute rows [R, D]: row i of the result is row `order[i]`."""
    return _Permuted.apply(rows, order, False)  # pyright: ignore[reportReturnType]


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    """Inverse of `reorder`: row `order[i]` of the result is row i."""
    return _Permuted.apply(rows, order, True)  # pyright: ignore[reportReturnType]


class _Permuted(torch.autograd.Function):
    """The gradient of a permutation is its inverse: rows are copied, and nothing is summed. Saves the order, 8 bytes a row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back = back
        return _permuted(rows, order, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _permuted(grad, ctx.saved_tensors[0], not ctx.back), None, None


def _permuted(rows: Tensor, order: Tensor, back: bool) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, order, rows) if back else rows.index_select(0, order)
