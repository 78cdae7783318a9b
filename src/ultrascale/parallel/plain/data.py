"""Data parallelism: every rank has the whole model and its own sequences; gradients are summed, updates are alike.

ZeRO 1 (Rajbhandari et al. 2020): nobody needs all moments of Adam. Each rank keeps those of a part of the parameters, updates
that part, and the parts are gathered. The same bytes are sent as for one all-reduce: a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up every gradient over all ranks, in place. The losses must be divided by what the whole batch has, not the
    rank's."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


class ShardedAdam:
    """Adam whose moments are cut over ranks (ZeRO 1). `parameters`: the same on every rank, with their own gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float):
        self.parameters = list(parameters)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.size = -(-sum(p.numel() for p in self.parameters) // self.world)
        self.shard = nn.Parameter(self._flat([p.detach() for p in self.parameters])[self.rank].clone())
        self.adam = torch.optim.Adam([self.shard], lr=learning_rate)

    def step(self) -> None:
        """Sum the gradients, each rank its part; update that part; gather all parts."""
        self.shard.grad = torch.empty_like(self.shard)
        rows = self._flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters])
        dist.reduce_scatter_tensor(self.shard.grad, rows.flatten())
        self.adam.step()
        whole = torch.empty_like(rows).flatten()
        dist.all_gather_into_tensor(whole, self.shard.detach())
        first = 0
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(whole[first : first + parameter.numel()].view_as(parameter))
                first += parameter.numel()
                parameter.grad = None

    def _flat(self, tensors: list[Tensor]) -> Tensor:
        """All of them end to end, padded: [ranks, size]."""
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.cat([joined, joined.new_zeros(self.world * self.size - len(joined))]).view(self.world, self.size)
