"""Cross-entropy of logits in Triton: the loss of each row, and its gradient written over the logits.

    first pass     maximum and sum of exponentials relative to it, block by block (Milakov and Gimelshein 2018)
    second pass    softmax(logits) - onehot, written over the logits

Memory traffic per element: 3 (read, read, write), of which the second read of a row that fits the L2 cache is nearly free. No
other tensor of the logits' size is allocated. Computes in fp32. It does the work between the GEMMs of
`kernels.loss.cross_entropy`.
"""

# What `triton.jit` makes of a function has no types, and triton need not be installed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ultrascale.kernels.loss.cross_entropy_columns import IGNORED
from ultrascale.kernels.triton_launch import warps_for

_LARGEST_BLOCK = 4096
"""Most logits that a program has in registers at a time."""


def loss_and_gradient_(logits: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(logits)[target] of each row, [N] fp32, 0 where the target is -100; `logits` [N, V] become their gradient.

    logits contiguous, 16 bits or fp32; targets [N] int64, inside the vocabulary or -100.
    """
    assert logits.is_contiguous(), "they are written over, row after row"
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(_LARGEST_BLOCK, triton.next_power_of_2(columns))
        _loss[(rows,)](
            logits, targets.contiguous(), losses, columns, IGNORED_TARGET=IGNORED, BLOCK=block, num_warps=warps_for(block)
        )
    return losses


@triton.jit
def _loss(logits, targets, losses, columns, IGNORED_TARGET: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    target = tl.load(targets + row)
    offsets = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, columns, BLOCK):
        x = tl.load(start + first + offsets, mask=first + offsets < columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(highest, x)
        # A lane that has seen nothing yet has -inf for both, and adds nothing.
        total = total * tl.where(highest == new, 1.0, tl.exp(highest - new)) + tl.where(
            x == float("-inf"), 0.0, tl.exp(x - new)
        )
        highest = new
    peak = tl.max(highest, axis=0)
    normalizer = peak + tl.log(tl.sum(total * tl.exp(highest - peak), axis=0))
    counts = target != IGNORED_TARGET
    wanted = tl.load(start + tl.where(counts, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, normalizer - wanted, 0.0))
    tl.debug_barrier()  # a faster warp would overwrite logits that another has yet to read
    for first in range(0, columns, BLOCK):
        inside = first + offsets < columns
        x = tl.load(start + first + offsets, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.exp(x - normalizer) - tl.where(first + offsets == target, 1.0, 0.0)
        tl.store(start + first + offsets, tl.where(counts, gradient, 0.0).to(logits.dtype.element_ty), mask=inside)
