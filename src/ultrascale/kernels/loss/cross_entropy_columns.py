"""Cross-entropy of hidden W^T by slabs of the vocabulary: for large vocabularies in 16 bits on CUDA.

    first     compute every slab's logits [N, C], and accumulate each row's log-sum-exp over slabs
    second    recompute them, turn them into the gradient g, and dW[slab] = g^T h    dh += g W[slab]

Why not chunks of rows, as in `kernels.loss.cross_entropy`: there every chunk adds to the whole of dW, which is fp32 until the
last chunk (4 V D bytes, read and written for each) with a narrow product or copy next to it: 6 V D bytes, 2.9 GiB for Llama 3
8B. Here a slab of dW is one GEMM over all rows: accumulated inside the GEMM and rounded once. Only dh is accumulated in memory,
N D instead of V D.

Memory: dh and dW in their own dtype, dh once more in fp32, and one slab. Cost: a fourth GEMM, 2 N V D FLOPs. With the
vocabulary sharded over ranks each processes its own slabs, and two numbers a row are gathered, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ultrascale.kernels.choice.wide import wide_dtype

IGNORED = -100
"""Target of a position that predicts nothing."""

GatherTerms = Callable[[Tensor], Tensor]
"""Function from a rank's [N, 2] (log-sum-exp, the target's logit or 0) to those of all ranks, [ranks, N, 2]."""


class KeptGradients(torch.autograd.Function):
    """A loss whose forward pass saves the gradients of hidden and weight."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grads[0]), grad_weight.mul_(grads[0]), *([None] * (len(ctx.needs_input_grad) - 2))


class LossAndGradients(NamedTuple):
    """The summed loss and, if requested, its gradients: of hidden [N, D] and of weight [V, D]."""

    loss: Tensor
    grad_hidden: Tensor | None
    grad_weight: Tensor | None


def loss_by_columns(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    columns: int,
    *,
    with_gradients: bool,
    first: int = 0,
    join: GatherTerms | None = None,
    compiled: bool = False,
) -> LossAndGradients:
    """Sum over targets != -100 of -log softmax(hidden W^T)[target], and both gradients.

    hidden [N, D] and weight [V, D] of one dtype, targets [N] int64 inside the vocabulary; `columns` of logits are in memory at
    a time. `first` and `join`: for a sharded vocabulary, this shard's first row, and the gather of all ranks' terms.
    `compiled`: use compiled passes over a slab's logits.
    """
    wanted = targets.unsqueeze(1)
    of_slabs, target_logit = _first(hidden, weight, wanted - first, columns, compiled)
    terms = torch.cat((torch.logsumexp(of_slabs, 0), target_logit), dim=1)  # [N, 2]
    normalizers, target_logits = (terms.unsqueeze(0) if join is None else join(terms)).unsqueeze(-2).unbind(-1)  # [ranks, N, 1]
    normalizer, is_valid = torch.logsumexp(normalizers, 0), wanted != IGNORED
    loss = ((normalizer - target_logits.sum(0)) * is_valid).sum()
    if not with_gradients:
        return LossAndGradients(loss, None, None)
    # All exponentials of an ignored row become 0, and so does its gradient.
    silent = normalizer.masked_fill(~is_valid, torch.inf)
    wide, grad_weight = _second(hidden, weight, wanted - first, silent, of_slabs, columns, compiled)
    return LossAndGradients(loss, wide.to(hidden.dtype), grad_weight)


def _logits(hidden: Tensor, slab: Tensor, buffer: Tensor) -> Tensor:
    """Logits [N, C] of hidden [N, D] and a slab of the weight [C, D], in a reused buffer."""
    return torch.mm(hidden, slab.t(), out=buffer[: len(hidden) * len(slab)].view(len(hidden), len(slab)))


def _first(hidden: Tensor, weight: Tensor, local: Tensor, columns: int, compiled: bool) -> tuple[Tensor, Tensor]:
    """First sweep, in fp32 or wider: log-sum-exp of each slab [slabs, N, 1], and the target's logit if it is in this shard of
    the vocabulary, else 0, [N, 1]. `local` [N, 1]: targets relative to the shard's first row."""
    buffer, normalizers = hidden.new_empty(len(hidden) * columns), []
    target_logit = hidden.new_zeros(len(hidden), 1, dtype=wide_dtype(hidden))
    normalizer = compiled_once(_normalizer) if compiled else _normalizer_by_softmax
    for start in range(0, len(weight), columns):
        logits = _logits(hidden, weight[start : start + columns], buffer)
        target_logit += _target_logits(logits, local - start)
        normalizers.append(normalizer(logits))
    return torch.stack(normalizers), target_logit


def _target_logits(logits: Tensor, local: Tensor) -> Tensor:
    """Logit of each row's target if it is in this slab, else 0, [N, 1]."""
    is_here = (local >= 0) & (local < logits.shape[1])
    return logits.gather(1, local.masked_fill(~is_here, 0)).to(wide_dtype(logits)).masked_fill_(~is_here, 0)


def _second(
    hidden: Tensor, weight: Tensor, local: Tensor, normalizer: Tensor, of_slabs: Tensor, columns: int, compiled: bool
) -> tuple[Tensor, Tensor]:
    """dh [N, D] in at least fp32, and dW [V, D]."""
    buffer = hidden.new_empty(len(hidden) * columns)
    grad_hidden = torch.zeros_like(hidden, dtype=wide_dtype(hidden))
    grad_weight = torch.empty_like(weight)
    product = torch.empty_like(hidden) if hidden.dtype != grad_hidden.dtype else None
    to_gradient = compiled_once(_to_gradient) if compiled else _to_gradient_by_softmax
    for number, start in enumerate(range(0, len(weight), columns)):
        slab = weight[start : start + columns]
        logits = _logits(hidden, slab, buffer)
        to_gradient(logits, local - start, normalizer, of_slabs[number])
        torch.mm(logits.t(), hidden, out=grad_weight[start : start + columns])
        if product is None:
            grad_hidden.addmm_(logits, slab)
        else:
            grad_hidden.add_(torch.mm(logits, slab, out=product))
    return grad_hidden, grad_weight


def _normalizer(logits: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row, [N, 1] in at least fp32."""
    return torch.logsumexp(logits.to(wide_dtype(logits)), dim=1, keepdim=True)


def _normalizer_by_softmax(logits: Tensor) -> Tensor:
    """`_normalizer` with a single torch kernel between the wide copy and its result: any column of the softmax yields the row's
    sum."""
    normalized = torch.log_softmax(logits, dim=1, dtype=wide_dtype(logits))
    return logits[:, :1].to(normalized.dtype) - normalized[:, :1]


def _to_gradient(logits: Tensor, local: Tensor, normalizer: Tensor, of_slab: Tensor) -> None:
    """Turn `logits` [N, C] into probabilities, less one at the target, in place."""
    is_target = (torch.arange(logits.shape[1], device=logits.device) == local) & normalizer.isfinite()
    logits.copy_(torch.exp(logits.to(normalizer.dtype) - normalizer) - is_target.to(normalizer.dtype))


def _to_gradient_by_softmax(logits: Tensor, local: Tensor, normalizer: Tensor, of_slab: Tensor) -> None:
    """`_to_gradient` with one torch kernel: softmax over the slab's columns, times the slab's total probability."""
    share = torch.exp(of_slab - normalizer)  # [N, 1]
    probabilities = torch.softmax(logits, dim=1, dtype=share.dtype)
    torch.mul(probabilities, share, out=logits)
    is_here = (local >= 0) & (local < logits.shape[1])
    index = local.masked_fill(~is_here, 0)
    at_target = probabilities.gather(1, index).mul_(share).sub_(1).to(logits.dtype)
    logits.scatter_(1, index, torch.where(is_here, at_target, logits.gather(1, index)))


@cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A pass, compiled. Not at import: loading the compiler takes a second and 100 MB."""
    return torch.compile(function, dynamic=False)
