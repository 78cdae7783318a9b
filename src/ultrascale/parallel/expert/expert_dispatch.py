"""Tokens to the ranks of their experts, and results back.

    tokens [N, D]        every rank's own; without sequence parallelism ranks of tp hold the same, and each takes its part
      | spread           a row for each (token, expert) pair, in the order of experts: R of N k, less those dropped
      | ep: exchange     rows go to the ranks of their experts; how many was agreed before, in a message of X integers
      | expert_tp: all_gather  ranks that cut the same experts' F hold each other's rows too
      | by expert        rows of all sources, next to each other for one grouped product per weight
    experts              X/ep experts, F/expert_tp of each
      | expert_tp: reduce_scatter, ep: exchange back, weighted sum, unshard_rows over tp      and so home

Bytes a layer and rank, in elements of D each way, with balanced experts: N k (ep-1)/ep over ep and N k (expert_tp-1) over
expert_tp; dispatch and combine, forward and backward: four times that. Sending first and gathering then sends each row once
over ep, the slower network; gathering tokens before they are copied k times would move less only where k is more than ep.
The host waits once a layer, to learn how many rows come from whom: nothing is dropped or padded to avoid it.

`start` leaves rows under way while shared experts compute. Nothing is scaled: losses and gradients are sums over tokens, and an
expert's gradient is whole as soon as every token that visited it has been there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.kernels.expert_rows import spread, weighted_sum
from ultrascale.parallel.all_to_all import TokenExchange, all_gather, reduce_scatter, shard_rows, unshard_rows
from ultrascale.parallel.expert.expert_rows import order_by_expert, put_back, reorder
from ultrascale.work.sharding.places import even_part

Experts = Callable[[Tensor, Tensor], Tensor]
"""Function from rows [R, D] in the order of this rank's experts, and the number of rows of each, [X/ep] int64, to the results
[R, D]."""


class Dispatch:
    """The `dispatch` of an MoE layer under expert parallelism. Groups that are None have one rank."""

    def __init__(
        self,
        num_experts: int,
        *,
        ep: dist.ProcessGroup | None = None,
        expert_tp: dist.ProcessGroup | None = None,
        same_tokens: dist.ProcessGroup | None = None,
    ):
        """`num_experts`: of the layer, X. `same_tokens`: the ranks of tp, if all of them hold the same tokens."""
        self.num_experts, self.ep, self.expert_tp, self.same_tokens = num_experts, ep, expert_tp, same_tokens
        ranks = 1 if ep is None else ep.size()
        firsts = [even_part(num_experts, ranks, rank)[0] for rank in range(ranks)]
        self.bounds = [*firsts, num_experts]
        """The first expert of each rank of ep, and the end."""

    def __call__(self, tokens: Tensor, routing: tuple[Tensor, Tensor], experts: Experts) -> Tensor:
        """Results of tokens [N, D], each token's summed by their weights, [N, D]."""
        return self.finish(self.start(tokens, routing), experts)

    def start(self, tokens: Tensor, routing: tuple[Tensor, Tensor]) -> UnderWay:
        """Send tokens [N, D] to their experts, [N, k] int64, whose results will count by weights [N, k].

        Experts >= X: a pair that was dropped, and is not sent.
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
        """Let the experts compute with what arrives, and bring the results home: [N, D]."""
        exchange = under_way.exchange
        rows = self._compute(self._arrived(under_way), under_way, experts)
        if exchange is not None:
            home = TokenExchange(exchange.received, exchange.sent, exchange.group)
            rows = home.arrive(home.depart(rows))
        tokens = weighted_sum(rows, under_way.pairs, under_way.weights)
        return tokens if self.same_tokens is None else unshard_rows(tokens, under_way.lengths, self.same_tokens)

    def _arrived(self, under_way: UnderWay) -> Tensor:
        """The rows, for whom it is told alone."""
        rows, under_way.rows = under_way.rows, None
        assert rows is not None, "they were taken before"
        return rows if under_way.exchange is None else under_way.exchange.arrive(rows)

    def _compute(self, rows: Tensor, under_way: UnderWay, experts: Experts) -> Tensor:
        """Results of rows by source and expert, in the same order. `rows` holds the only reference to any of them."""
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
        """Exchanges counts: from the rows that this rank sends to each expert, [X], to those that arrive: [expert_tp, ep,
        X/ep], rows that will be gathered over expert_tp from its other ranks included."""
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
    """Rows that have been sent and what is known of them."""

    rows: Tensor | None
    """Rows to send; None once they have been taken."""
    pairs: Tensor
    """Index of the (token, choice) of each sent row, [R] int64."""
    weights: Tensor
    """[own N, k]."""
    arriving: Tensor
    """Rows for each expert of this rank, by the ranks that send them: [expert_tp, ep, X/ep] int64."""
    from_rank: list[list[int]]
    """Rows from each rank: sums over experts, on the host."""
    lengths: list[int]
    """Tokens of each rank of tp, if all of them hold the same; else none."""
    exchange: TokenExchange | None = None


def _to_host(sent: Tensor, from_rank: Tensor) -> tuple[list[int], list[list[int]]]:
    """Both as numbers, in one copy."""
    numbers = torch.cat([sent, from_rank.flatten()]).tolist()
    width: int = from_rank.shape[1]
    rest: Sequence[int] = numbers[len(sent) :]
    return numbers[: len(sent)], [list(rest[first : first + width]) for first in range(0, len(rest), width)]
