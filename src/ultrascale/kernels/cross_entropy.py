"""The head and its loss in one: cross-entropy of hidden W^T without ever holding all logits.

Logits are the largest activation of a small model (N x V: 64 MiB at 2,048 tokens and a vocabulary of 8,192, three to four
times that in a plain backward pass). Here a chunk of rows at a time goes all the way to its gradients in the forward pass
(as in Liger Kernel, Hsu et al. 2024; Cut Cross-Entropy, Wijmans et al. 2024):

    logits = h W^T     loss += -log softmax(logits)[target]     g = softmax(logits) - onehot     dh = g W     dW += g^T h

Saves for the backward pass: dh [N, D] and dW [V, D], which it multiplies in place by the gradient of the loss and hands on; a
second backward pass through the same loss is therefore an error (autograd sees that they changed).
Cost: the same three matrix products, one chunk of logits (8 MiB on CPU: it stays in cache; measured 2 times as fast as
`F.cross_entropy` in fp32 and bf16). The alternative, keeping dlogits in place of the logits, costs N x V for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The target of a position that predicts nothing."""

_CHUNK_BYTES = {"cpu": 2**23, "cuda": 2**29}
_MIN_CHUNK_ROWS = 128


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over targets != -100 of -log softmax(hidden W^T)[target]: 0-d, fp32, or fp64 when `hidden` is.

    hidden [..., D] and weight [V, D] of one dtype, targets [...] int64. A target outside the vocabulary raises on CPU and trips
    a device assertion on CUDA.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if torch.compiler.is_compiling():
        logits = F.linear(hidden, weight)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORED, reduction="sum")
    return _LinearCrossEntropy.apply(hidden, weight, targets, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


def chunk_rows(num_rows: int, vocab_size: int, device_type: str = "cpu") -> int:
    """Rows of logits that exist at a time."""
    rows = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cuda"]) // (4 * vocab_size)
    return min(num_rows, max(_MIN_CHUNK_ROWS, rows))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_gradients: bool) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        with_gradients = with_gradients and any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if with_gradients else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if with_gradients else None
        rows = chunk_rows(hidden.shape[0], weight.shape[0], hidden.device.type)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            log_probabilities, is_valid, index = _chunk(hidden[part], weight, targets[part], wide)
            loss -= (log_probabilities.gather(1, index) * is_valid).sum()
            if grad_hidden is not None and grad_weight is not None:
                grad = _grad_logits(log_probabilities, index).to(hidden.dtype)
                # Rows that do not count are silenced here, D wide, not in `grad`, V wide.
                torch.mm(grad, weight, out=grad_hidden[part]).masked_fill_(~is_valid, 0)
                _accumulate(grad_weight, grad.t(), hidden[part].masked_fill(~is_valid, 0))
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grads[0]), grad_weight.mul_(grads[0]), None, None


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """log softmax of the logits [rows, V], which rows count [rows, 1], and their targets [rows, 1]."""
    is_valid = (targets != IGNORED).unsqueeze(1)
    index = targets.unsqueeze(1).masked_fill(~is_valid, 0)
    return torch.log_softmax(hidden @ weight.t(), dim=-1, dtype=wide), is_valid, index


def _grad_logits(log_probabilities: Tensor, index: Tensor) -> Tensor:
    """softmax - onehot, in place."""
    grad = log_probabilities.exp_()
    return grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the dtype of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
