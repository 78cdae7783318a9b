"""Cross-entropy of hidden W^T, a slab of the vocabulary at a time: for large vocabularies in 16 bits on CUDA.

    first     every slab's logits [N, C] are made, and folded into each row's log of the sum of exponentials
    second    they are made again, become the gradient g, and dW[slab] = g^T h    dh += g W[slab]

Why not a chunk of rows at a time, as `kernels.cross_entropy` does elsewhere: there every chunk adds to the whole of dW, which
is fp32 until the last has (4 V D bytes, read and written again for each) with a narrow product or copy beside it: 6 V D bytes,
2.9 GiB of Llama 3 8B. Here a slab of dW is one product over all rows: summed inside the product and rounded once. What is added
up is dh, N D instead of V D.

Memory: dh and dW in their own dtype, dh once more in fp32, and one slab. Cost: a fourth matrix product, 2 N V D FLOPs.
With a vocabulary cut over ranks each folds its own slabs, and three numbers a row are gathered, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The target of a position that predicts nothing."""

Join = Callable[[Tensor], Tensor]
"""[N, 3] of a rank (maximum, sum of exponentials below it, the target's logit or 0) to those of all ranks, [ranks, N, 3]."""


class Swept(NamedTuple):
    """The summed loss, and its gradients if they were asked for: those of hidden [N, D] and of weight [V, D]."""

    loss: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None


def sweep_columns(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    columns: int,
    *,
    with_gradients: bool,
    first: int = 0,
    join: Join | None = None,
    compiled: bool = False,
) -> Swept:
    """Sum over targets != -100 of -log softmax(hidden W^T)[target], and both gradients.

    hidden [N, D] and weight [V, D] of one dtype, targets [N] int64 inside the vocabulary; `columns` of logits exist at a time.
    `first` and `join`: this is the part of a vocabulary from that row on, and how to hear of the others. `compiled`: the passes
    over a slab's logits are.
    """
    wanted = targets.unsqueeze(1)
    own = _fold(hidden, weight, wanted - first, columns, compiled)  # [N, 3]
    maxima, sums, target_logits = (own.unsqueeze(0) if join is None else join(own)).unsqueeze(-2).unbind(-1)  # [ranks, N, 1]
    highest = maxima.amax(0)
    normalizer = highest + (sums * torch.exp(maxima - highest)).sum(0).log()
    is_valid = wanted != IGNORED
    loss = ((normalizer - target_logits.sum(0)) * is_valid).sum()
    if not with_gradients:
        return Swept(loss, None, None)
    # Of a row that does not count all exponentials become 0, and so does its gradient.
    silent = normalizer.masked_fill(~is_valid, torch.inf)
    wide, grad_weight = _gradients(hidden, weight, wanted - first, silent, columns, compiled)
    return Swept(loss, wide.to(hidden.dtype), grad_weight)


class _Room:
    """Memory for one slab of logits, taken once, and its wide copy unless compiled passes need none."""

    def __init__(self, hidden: Tensor, columns: int, *, compiled: bool):
        self.narrow = hidden.new_empty(len(hidden) * columns)
        self.wide = self.narrow
        if hidden.dtype != _wide(hidden) and not compiled:
            self.wide = torch.empty_like(self.narrow, dtype=_wide(hidden))

    def logits(self, hidden: Tensor, slab: Tensor) -> tuple[Tensor, Tensor]:
        """[N, C] of hidden [N, D] and a slab of the weight [C, D]: as they come, and their wide copy (or the same)."""
        count = len(hidden) * len(slab)
        narrow = torch.mm(hidden, slab.t(), out=self.narrow[:count].view(len(hidden), len(slab)))
        if self.wide is self.narrow:
            return narrow, narrow
        return narrow, self.wide[:count].view_as(narrow).copy_(narrow)


def _fold(hidden: Tensor, weight: Tensor, local: Tensor, columns: int, compiled: bool) -> Tensor:
    """[N, 3] in at least fp32: maximum, sum of exponentials below it, and the target's logit where it is here, else 0."""
    room, dtype = _Room(hidden, columns, compiled=compiled), _wide(hidden)
    highest = hidden.new_full((len(hidden), 1), -torch.inf, dtype=dtype)
    total, target_logit = torch.zeros_like(highest), torch.zeros_like(highest)
    fold = _compiled(_fold_slab) if compiled else _fold_slab_in_place
    for start in range(0, len(weight), columns):
        slab = weight[start : start + columns]
        logits, wide = room.logits(hidden, slab)
        target_logit += _target_logits(logits, local - start)
        highest, total = fold(wide, highest, total)
    return torch.cat((highest, total, target_logit), dim=1)


def _target_logits(logits: Tensor, local: Tensor) -> Tensor:
    """[N, 1]: the logit of each row's target where it is in this slab, else 0."""
    is_here = (local >= 0) & (local < logits.shape[1])
    return logits.gather(1, local.masked_fill(~is_here, 0)).to(_wide(logits)).masked_fill_(~is_here, 0)


def _gradients(
    hidden: Tensor, weight: Tensor, local: Tensor, normalizer: Tensor, columns: int, compiled: bool
) -> tuple[Tensor, Tensor]:
    """dh [N, D] in at least fp32, and dW [V, D]."""
    room = _Room(hidden, columns, compiled=compiled)
    grad_hidden = torch.zeros_like(hidden, dtype=_wide(hidden))
    grad_weight = torch.empty_like(weight)
    product = torch.empty_like(hidden) if hidden.dtype != grad_hidden.dtype else None
    to_gradient = _compiled(_to_gradient) if compiled else _to_gradient_in_place
    for start in range(0, len(weight), columns):
        slab = weight[start : start + columns]
        logits, wide = room.logits(hidden, slab)
        to_gradient(logits, wide, local - start, normalizer)
        torch.mm(logits.t(), hidden, out=grad_weight[start : start + columns])
        if product is None:
            grad_hidden.addmm_(logits, slab)
        else:
            grad_hidden.add_(torch.mm(logits, slab, out=product))
    return grad_hidden, grad_weight


def _fold_slab(logits: Tensor, highest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and sum of exponentials below it, [N, 1] each, of what came before and of one slab more."""
    wide = logits.to(highest.dtype)
    new = torch.maximum(highest, wide.amax(1, keepdim=True))
    return new, total * torch.exp(highest - new) + torch.exp(wide - new).sum(1, keepdim=True)


def _fold_slab_in_place(wide: Tensor, highest: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The same without room of its own: `wide` becomes exponentials."""
    new = torch.maximum(highest, wide.amax(1, keepdim=True))
    return new, total * torch.exp(highest - new) + wide.sub_(new).exp_().sum(1, keepdim=True)


def _to_gradient(logits: Tensor, wide: Tensor, local: Tensor, normalizer: Tensor) -> None:
    """`logits` [N, C] become probabilities, less one at the target."""
    is_target = torch.arange(logits.shape[1], device=logits.device) == local
    logits.copy_(torch.exp(wide.to(normalizer.dtype) - normalizer) - (is_target & normalizer.isfinite()).to(normalizer.dtype))


def _to_gradient_in_place(logits: Tensor, wide: Tensor, local: Tensor, normalizer: Tensor) -> None:
    """The same without room of its own: `wide` becomes the gradient first."""
    is_here = (local >= 0) & (local < logits.shape[1])
    wide.sub_(normalizer).exp_()
    wide.scatter_add_(1, local.masked_fill(~is_here, 0), -is_here.to(wide.dtype))
    if wide.dtype != logits.dtype:
        logits.copy_(wide)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not at import: loading the compiler takes a second and 100 MB.
    return torch.compile(function, dynamic=False)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
