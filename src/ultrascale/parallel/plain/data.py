"""Data parallelism: every rank has the whole model and its own sequences; gradients are summed, and every rank updates alike.

ZeRO 1 (Rajbhandari et al. 2020): no rank needs all of Adam's moments. Each keeps those of its shard of the parameters and
updates it; the shards are then all-gathered. A reduce-scatter and an all-gather send as many bytes as one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum every gradient over all ranks, in place. Losses must be divided by the token count of the whole batch, not the
    rank's."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


class ShardedAdam:
    """Adam with moments sharded over ranks (ZeRO 1). `parameters`: the same on every rank, with the rank's gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float):
        self.parameters = list(parameters)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.size = -(-sum(p.numel() for p in self.parameters) // self.world)
        self.shard = nn.Parameter(self._flat([p.detach() for p in self.parameters])[self.rank].clone())
        self.adam = torch.optim.Adam([self.shard], lr=learning_rate)

    def step(self) -> None:
        """Reduce-scatter the gradients, update this rank's shard, and all-gather the shards."""
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
        """Tensors flattened end to end and padded: [ranks, size]."""
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.cat([joined, joined.new_zeros(self.world * self.size - len(joined))]).view(self.world, self.size)
