"""Partitioned activation checkpointing: the inputs of recomputed blocks are sharded over the tp ranks that all hold the same
one (ZeRO-R's P_a; Rajbhandari et al. 2020, section 6.1).

    forward    each rank keeps its positions of the input, [B, S/tp, D]
    backward   all-gather them, [B, S, D], and recompute the block

Without sequence parallelism every tp rank holds the whole residual stream, with the same bits, so each checkpoint exists tp
times. Sharding the checkpoints costs one all-gather of B S D elements per block. Sequence parallelism shards the stream from
the start, norms included, with no extra traffic: it is the better way to the same saving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ultrascale.parallel.activations.regions import storage_key
from ultrascale.parallel.tensor.tensor_ops import gathered_sequence
from ultrascale.work.sharding.places import even_part


class InputShard(NamedTuple):
    """This rank's shard of a block's input by positions, [B, S/tp, D]."""

    local: Tensor
    length: int


def keep_local_part(
    group: dist.ProcessGroup, forward: Callable[..., Tensor], hidden: Tensor, *shared: Any, **options: Any
) -> Tensor:
    """Forward pass of a recomputed block; this rank of `group` saves only its shard of the input [B, S, D]."""
    if not torch.is_grad_enabled():
        return forward(hidden, *shared, **options)
    key = storage_key(hidden)

    def pack(tensor: Tensor) -> Tensor | InputShard:
        if storage_key(tensor) != key:
            return tensor
        first, count = even_part(tensor.shape[1], group.size(), group.rank())
        return InputShard(tensor.detach()[:, first : first + count].clone(), tensor.shape[1])

    def unpack(saved: Tensor | InputShard) -> Tensor:
        return saved if isinstance(saved, Tensor) else gathered_sequence(saved.local, group.group_name, saved.length)

    with saved_tensors_hooks(pack, unpack):
        return forward(hidden, *shared, **options)
