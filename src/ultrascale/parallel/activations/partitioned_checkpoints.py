"""Inputs of blocks that are computed again, cut over the ranks of tp that all hold the same one (ZeRO-R's P_a; Rajbhandari et
al. 2020, section 6.1).

    forward    each rank keeps its positions of the input, [B, S/tp, D]
    backward   all gather them, [B, S, D], and compute the block again

Without sequence parallelism the residual stream is whole, and the same bits, on every rank of tp: so are the checkpoints, tp
times over. Cut, they cost one all-gather of B S D elements a block. With sequence parallelism the stream is cut to begin with,
norms and all, for no traffic more: it is the better way to the same end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ultrascale.parallel.tensor.tensor_ops import gathered_sequence
from ultrascale.work.sharding.places import even_part


class Part(NamedTuple):
    """This rank's shard of a block's input by positions, [B, S/tp, D]."""

    local: Tensor
    length: int


def keep_local_part(
    group: dist.ProcessGroup, forward: Callable[..., Tensor], hidden: Tensor, *shared: Any, **options: Any
) -> Tensor:
    """The forward pass of a recomputed block, of whose input [B, S, D] this rank of `group` keeps a part."""
    if not torch.is_grad_enabled():
        return forward(hidden, *shared, **options)
    storage = hidden.untyped_storage()._cdata

    def pack(tensor: Tensor) -> Tensor | Part:
        if tensor.untyped_storage()._cdata != storage:
            return tensor
        first, count = even_part(tensor.shape[1], group.size(), group.rank())
        return Part(tensor.detach()[:, first : first + count].clone(), tensor.shape[1])

    def unpack(saved: Tensor | Part) -> Tensor:
        return saved if isinstance(saved, Tensor) else gathered_sequence(saved.local, group.group_name, saved.length)

    with saved_tensors_hooks(pack, unpack):
        return forward(hidden, *shared, **options)
