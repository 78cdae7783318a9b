"""Fused linear cross-entropy: head and loss in one, without materialising all logits.

Logits are the largest activation of a small model (N x V: 64 MiB at 2,048 tokens and a vocabulary of 8,192, three to four times
that in a plain backward pass). Here each chunk of rows is taken to its gradients within the forward pass (as in Liger Kernel,
Hsu et al. 2024; Cut Cross-Entropy, Wijmans et al. 2024):

    logits = h W^T     loss += -log softmax(logits)[target]     g = softmax(logits) - onehot     dh = g W     dW += g^T h

Saves for the backward pass: dh [N, D] and dW [V, D], which it multiplies in place by the gradient of the loss and returns; a
second backward pass through the same loss is therefore an error (autograd sees that they changed). Cost: the same three GEMMs,
and memory for one chunk: logits and log-probabilities in fp32 (8 MiB each on CPU: they stay in cache; measured 2 times as fast
as `F.cross_entropy` in fp32 and bf16); in bf16 also the logits and a partial dW. The alternative, keeping dlogits in place of
the logits, holds N x V elements until the backward pass.

With `compiled`, the work between the GEMMs is one compiled in-place pass over a chunk: in bf16 on CPU the whole loss then takes
two thirds of the time. In fp32 on CPU it is no faster and not used.

In 16 bits on CUDA, where the logits would take several chunks, `kernels.loss.cross_entropy_columns` needs less memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.choice.device_kind import is_cuda, kind_of
from ultrascale.kernels.choice.implementation import form_of
from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.kernels.loss.cross_entropy_columns import IGNORED, KeptGradients, compiled_once, loss_by_columns
from ultrascale.torch_private import assert_on_device
from ultrascale.work.work import chunk_rows, slab_columns

__all__ = ["IGNORED", "linear_cross_entropy"]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, compiled: bool = False) -> Tensor:
    """Sum over targets != -100 of -log softmax(hidden W^T)[target]: 0-d, fp32, or fp64 when `hidden` is.

    hidden [..., D] and weight [V, D] of one dtype, targets [...] int64. A target outside the vocabulary raises on CPU and trips
    a device assertion on CUDA. `compiled`: use torch.compile where it is faster.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if torch.compiler.is_compiling():
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.to(wide_dtype(logits)), targets, ignore_index=IGNORED, reduction="sum")
    with_gradients = torch.is_grad_enabled()
    faster = is_cuda(hidden) or hidden.dtype != wide_dtype(hidden)
    fused = with_gradients and ((compiled and faster) or form_of("loss", hidden) != "torch")
    return _LinearCrossEntropy.apply(hidden, weight, targets, with_gradients, fused)  # pyright: ignore[reportReturnType]


class _LinearCrossEntropy(KeptGradients):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_gradients: bool, fused: bool) -> Tensor:
        with_gradients = with_gradients and any(ctx.needs_input_grad)
        columns = slab_columns(hidden.shape[0], weight.shape[0], hidden.itemsize, kind_of(hidden))
        if columns is not None:
            is_inside = (targets == IGNORED) | ((targets >= 0) & (targets < len(weight)))
            assert_on_device(is_inside.all())
            compiled = fused and form_of("loss", hidden) != "triton"
            swept = loss_by_columns(hidden, weight, targets, columns, with_gradients=with_gradients, compiled=compiled)
            ctx.save_for_backward(swept.grad_hidden, swept.grad_weight)
            return swept.loss
        if not with_gradients:
            return _sweep(hidden, weight, targets, None, None)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=wide_dtype(weight), device=weight.device)
        sweep = _compiled_sweep if fused else _sweep
        loss = sweep(hidden, weight, targets, grad_hidden, grad_weight)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss


class _Buffers:
    """Buffers for one chunk, allocated once: new pages for every chunk cost a tenth of the loss in fp32, a fifth in bf16
    (CPU)."""

    def __init__(self, hidden: Tensor, weight: Tensor, *, with_gradients: bool):
        wide, is_narrow = wide_dtype(hidden), hidden.dtype != wide_dtype(hidden)
        self.rows = chunk_rows(hidden.shape[0], weight.shape[0], kind_of(hidden))
        self.logits = hidden.new_empty(self.rows, weight.shape[0])
        self.wide_logits = torch.empty_like(self.logits, dtype=wide) if is_narrow else self.logits
        self.log_probabilities = torch.empty_like(self.logits, dtype=wide)
        self.product = torch.empty_like(weight) if is_narrow and with_gradients else None
        # CUDA adds bf16 to fp32 directly; the CPU would allocate this copy anew each time.
        copies = self.product is not None and not is_cuda(weight)
        self.wide_product = torch.empty_like(weight, dtype=wide) if copies else None


def _sweep(hidden: Tensor, weight: Tensor, targets: Tensor, grad_hidden: Tensor | None, grad_weight: Tensor | None) -> Tensor:
    """Loss computed chunk by chunk; fills `grad_hidden` and adds to `grad_weight` if they are given."""
    loss = torch.zeros((), dtype=wide_dtype(hidden), device=hidden.device)
    buffers = _Buffers(hidden, weight, with_gradients=grad_weight is not None)
    for start in range(0, hidden.shape[0], buffers.rows):
        part = slice(start, start + buffers.rows)
        is_valid = (targets[part] != IGNORED).unsqueeze(1)  # [rows, 1]
        index = targets[part].unsqueeze(1).masked_fill(~is_valid, 0)
        log_probabilities = _log_softmax(hidden[part], weight, buffers)
        loss -= (log_probabilities.gather(1, index) * is_valid).sum()
        if grad_hidden is not None and grad_weight is not None:
            grad = _grad_logits(log_probabilities, index, buffers)
            # Ignored rows are zeroed here, D wide, not in `grad`, V wide.
            torch.mm(grad, weight, out=grad_hidden[part]).masked_fill_(~is_valid, 0)
            _accumulate(grad_weight, grad.t(), hidden[part].masked_fill(~is_valid, 0), buffers)
    return loss


def _compiled_sweep(hidden: Tensor, weight: Tensor, targets: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> Tensor:
    """The compiled form of the sweep, with one pass over each chunk's logits between its GEMMs, and memory for one chunk
    allocated once."""
    loss = torch.zeros((), dtype=wide_dtype(hidden), device=hidden.device)
    rows = min(len(hidden), chunk_rows(hidden.shape[0], weight.shape[0], kind_of(hidden)) * 4 // hidden.itemsize)
    buffer = hidden.new_empty(rows, weight.shape[0])
    product = torch.empty_like(weight) if weight.dtype != grad_weight.dtype else None
    if form_of("loss", hidden) == "triton":
        to_gradient, add = _to_gradient_by_triton, _add
    else:
        to_gradient, add = compiled_once(_to_gradient), compiled_once(_add)
    for start in range(0, hidden.shape[0], rows):
        part = hidden[start : start + rows]
        logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
        wanted = targets[start : start + rows].unsqueeze(1)
        # Read before the pass: torch 2.11's compiled code (CPU; not 2.12, 2.13) would read them after overwriting them.
        target_logits = logits.gather(1, wanted.masked_fill(wanted == IGNORED, 0))
        loss += to_gradient(logits, wanted, target_logits).sum()
        torch.mm(logits, weight, out=grad_hidden[start : start + rows])
        if product is None:
            grad_weight.addmm_(logits.t(), part)
        else:
            add(grad_weight, torch.mm(logits.t(), part, out=product))
    return loss


def _to_gradient(logits: Tensor, targets: Tensor, target_logits: Tensor) -> Tensor:
    """-log softmax(logits)[target] [rows, 1]; `logits` become its gradient. Both are zero where ignored."""
    wide, is_valid = logits.to(wide_dtype(logits)), targets != IGNORED
    normalizer = torch.logsumexp(wide, dim=-1, keepdim=True)
    is_target = torch.arange(wide.shape[1], device=wide.device) == targets
    logits.copy_((torch.exp(wide - normalizer) - is_target.to(wide.dtype)) * is_valid)
    return (normalizer - target_logits) * is_valid


def _to_gradient_by_triton(logits: Tensor, targets: Tensor, target_logits: Tensor) -> Tensor:
    """Loss and gradient by `kernels.loss.triton_loss`, which needs no target logits."""
    from ultrascale.kernels.loss import triton_loss

    return triton_loss.loss_and_gradient_(logits, targets.squeeze(1))


def _add(total: Tensor, narrow: Tensor) -> None:
    """total += narrow, without the wide copy of `narrow` that the CPU makes for `add_`."""
    total += narrow


def _log_softmax(hidden: Tensor, weight: Tensor, buffers: _Buffers) -> Tensor:
    """log softmax of the logits of a chunk, [rows, V] in at least fp32."""
    rows = hidden.shape[0]
    logits, wide_logits = buffers.logits[:rows], buffers.wide_logits[:rows]
    torch.mm(hidden, weight.t(), out=logits)
    if wide_logits.dtype != logits.dtype:
        wide_logits.copy_(logits)
    return torch.log_softmax(wide_logits, dim=-1, out=buffers.log_probabilities[:rows])


def _grad_logits(log_probabilities: Tensor, index: Tensor, buffers: _Buffers) -> Tensor:
    """softmax - onehot, [rows, V] in the dtype of the logits."""
    grad = log_probabilities.exp_()
    grad.scatter_add_(1, index, torch.full_like(index, -1, dtype=grad.dtype))
    return grad if grad.dtype == buffers.logits.dtype else buffers.logits[: len(grad)].copy_(grad)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, buffers: _Buffers) -> None:
    """total += left @ right, in the dtype of `total`."""
    if buffers.product is None:
        total.addmm_(left, right)
        return
    product = torch.mm(left, right, out=buffers.product)
    total.add_(product if buffers.wide_product is None else buffers.wide_product.copy_(product))
