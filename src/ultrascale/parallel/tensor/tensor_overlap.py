"""Products of tp beside their own messages: `layout.tp_overlap`, on CUDA.

A product that reads a gathered sequence can begin with the part that is here while others are on their way, and one whose sum
is scattered can send the rows of one rank while it makes those of the next. torch does both over symmetric memory, which the
ranks of a node read straight from each other (`symm_mem::fused_all_gather_matmul`, `fused_matmul_reduce_scatter`):

    column products     forward      gather, product
    row product         forward      product, scatter      backward   gather, product for dy (dW follows from what was gathered)

The backward pass of column products hides its messages already (`tensor_ops`). Everything else, sequences that do not divide,
and other devices take the plain way, which computes the same. The alternative, cutting products into pieces of our own over
NCCL, costs a launch and a copy for each piece and needs SMs for NCCL beside the product's.

torch's operations have a plain form for devices without symmetric memory; tests put it in their place and prove, over gloo,
that what they are given is right. On several GPUs nobody has run them here yet.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.description.problems import mistake
from ultrascale.torch_private import load_symmetric_memory

_overlapping: set[str] = set()
"""Names of groups of tp. Operations know their group by its name."""


def overlap_in(group: dist.ProcessGroup) -> None:
    """Lets products over `group` overlap with their communication from now on, where they can.

    Raises SpecError if its ranks are not in one node, as far as torchrun tells.
    """
    in_node = int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))
    if in_node % group.size():
        rule = f"needs the {group.size()} ranks of tp in one node, which has {in_node}"
        raise mistake("layout.tp_overlap", rule, "Lower layout.tp, or leave it out.")
    load_symmetric_memory()
    _overlapping.add(group.group_name)


def overlaps(tensor: Tensor, group: str, length: int, ranks: int) -> bool:
    """True if a product of `tensor` over `group` overlaps with its communication; `length`: of the whole sequence, 0: not
    sharded."""
    return group in _overlapping and runs_on(tensor) and length > 0 and length % ranks == 0


def runs_on(tensor: Tensor) -> bool:
    """True if torch has these operations where `tensor` is."""
    return tensor.is_cuda


def gathered_products(part: Tensor, weights: list[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
    """[B, S/tp, D] of every rank and weights [F, D] to [B, S, D] and [B, S, F] each."""
    transposed = [weight.t() for weight in weights]
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(part.contiguous(), transposed, 1, group)
    return whole, products


def scattered_product(inner: Tensor, weight: Tensor, group: str) -> Tensor:
    """[B, S, F] and weight [D, F] to this rank's part of the sum over ranks, [B, S/tp, D]."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(inner, weight.t(), "sum", 1, group)
