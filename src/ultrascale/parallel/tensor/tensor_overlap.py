"""Overlap of tensor-parallel GEMMs with their own communication: `layout.tp_overlap`, on CUDA.

A GEMM that reads an all-gathered sequence can start with the local part while others are in flight, and one whose sum is
reduce-scattered can send the rows of one rank while it computes those of the next. torch does both over symmetric memory, which
the ranks of a node read directly from each other (`symm_mem::fused_all_gather_matmul`, `fused_matmul_reduce_scatter`):

    column-parallel     forward      all-gather, GEMM
    row-parallel        forward      GEMM, reduce-scatter     backward   all-gather, GEMM for dy (dW uses the gathered tensor)

The backward pass of column-parallel products already hides its communication (`tensor_ops`). Everything else, sequences that do
not divide evenly, and other devices use the plain path, which computes the same. The alternative, cutting GEMMs into pieces
over NCCL, costs a launch and a copy for each piece and takes SMs from the GEMM.

torch's operations have a fallback for devices without symmetric memory; tests use it to prove, over gloo, that the arguments
are right. They have not been run on several GPUs here yet.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.description.problems import mistake
from ultrascale.torch_private import load_symmetric_memory

_overlapping: set[str] = set()
"""Names of tp groups with overlap; operations identify their group by name."""


def overlap_in(group: dist.ProcessGroup) -> None:
    """Make products over `group` overlap with their communication from now on, where they can.

    Raises SpecError if its ranks are not in one node, as far as torchrun reports.
    """
    in_node = int(os.environ.get("LOCAL_WORLD_SIZE", group.size()))
    if in_node % group.size():
        rule = f"needs the {group.size()} ranks of tp in one node, which has {in_node}"
        raise mistake("layout.tp_overlap", rule, "Lower layout.tp, or leave it out.")
    load_symmetric_memory()
    _overlapping.add(group.group_name)


def overlaps(tensor: Tensor, group: str, length: int, ranks: int) -> bool:
    """True if a product of `tensor` over `group` overlaps with its communication. `length`: of the whole sequence; 0 if not
    sharded."""
    return group in _overlapping and runs_on(tensor) and length > 0 and length % ranks == 0


def runs_on(tensor: Tensor) -> bool:
    """True if torch has these operations on the device of `tensor`."""
    return tensor.is_cuda


def gathered_products(part: Tensor, weights: list[Tensor], group: str) -> tuple[Tensor, list[Tensor]]:
    """All-gather and products: [B, S/tp, D] of every rank and weights [F, D] to [B, S, D] and [B, S, F] each."""
    transposed = [weight.t() for weight in weights]
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(part.contiguous(), transposed, 1, group)
    return whole, products


def scattered_product(inner: Tensor, weight: Tensor, group: str) -> Tensor:
    """Product and reduce-scatter: [B, S, F] and weight [D, F] to this rank's part of the sum over ranks, [B, S/tp, D]."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(inner, weight.t(), "sum", 1, group)
