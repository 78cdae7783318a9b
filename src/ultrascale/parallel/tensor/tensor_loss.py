"""Vocabulary sharded over ranks: the embedding's rows, and head and cross-entropy without all-gathering logits.

    look up    each rank looks up the tokens whose rows it has, zeros elsewhere; the sum over ranks is the embedding
    loss       logits [rows, V/tp] of a chunk on each rank; three numbers a row are gathered (the maximum, the sum of
               exponentials relative to it, the target's logit where it is local), and every rank has the same loss

In 16 bits on CUDA a large vocabulary is processed in slabs of columns, and two numbers of all rows are gathered at once
(`kernels.loss.cross_entropy_columns`). Otherwise, as in `kernels.loss.cross_entropy`, a chunk's gradients are computed in the
forward pass too; dh, summed over ranks, and dW are kept for the backward pass. Per rank and step: hidden is gathered once and
dh summed once, N D (tp-1)/tp elements each, plus one message of 3 numbers a row for each chunk. The alternative, gathering the
logits, would send V/D times as much.

A token id outside the vocabulary belongs to no rank: without a check it would give a row of zeros, or a loss without its
target.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.choice.device_kind import is_cuda, kind_of
from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.kernels.loss.cross_entropy_columns import IGNORED, KeptGradients, compiled_once, loss_by_columns
from ultrascale.parallel.tensor.tensor_ops import TensorParallel
from ultrascale.parallel.tensor.tensor_traffic import all_gather_sequence, all_gather_stacked, sum_sequence
from ultrascale.torch_private import assert_on_device
from ultrascale.work.sharding.places import even_part
from ultrascale.work.work import chunk_rows, slab_columns


def look_up(tokens: Tensor, weight: Tensor, *, vocab_size: int, tp: TensorParallel) -> Tensor:
    """Vocabulary-parallel embedding: tokens [B, S] to [B, S/tp, D]; this rank has rows `weight` [V/tp, D].

    Raises IndexError on CPU if a token is outside the vocabulary, and trips a device assertion on CUDA.
    """
    _expect_inside(tokens, vocab_size, "a token")
    local = tokens - even_part(vocab_size, tp.group.size(), tp.group.rank())[0]
    is_elsewhere = (local < 0) | (local >= len(weight))
    rows = F.embedding(local.masked_fill(is_elsewhere, 0), weight)  # [B, S, D]
    return tp.reduce_scatter(rows.masked_fill_(is_elsewhere.unsqueeze(-1), 0))


def vocabulary_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, vocab_size: int, tp: TensorParallel, compiled: bool = False
) -> Tensor:
    """Sum over targets != -100 of -log softmax(hidden W^T)[target], the same on every rank: 0-d, fp32, or fp64.

    hidden [B, S/tp, D], weight [V/tp, D] of one dtype, targets [B, S] int64. Raises IndexError on CPU if a target is outside
    the vocabulary, and trips a device assertion on CUDA. `compiled`: the passes over a chunk's logits are, where
    that is faster (see `kernels.loss.cross_entropy`).
    """
    _expect_inside(targets.masked_fill(targets == IGNORED, 0), vocab_size, "a target")
    first = even_part(vocab_size, tp.group.size(), tp.group.rank())[0]
    # All ranks use one chunk size, even where their shards of the vocabulary differ.
    largest = even_part(vocab_size, tp.group.size(), 0)[1]
    rows = chunk_rows(targets.numel(), largest, kind_of(hidden))
    columns = slab_columns(targets.numel(), largest, hidden.itemsize, kind_of(hidden))
    fused = compiled and torch.is_grad_enabled() and (is_cuda(hidden) or hidden.dtype != wide_dtype(hidden))
    return _Loss.apply(hidden, weight, targets, first, LogitsChunk(rows, columns), tp, fused)  # pyright: ignore[reportReturnType]


class LogitsChunk(NamedTuple):
    """Logits in memory at a time: those of so many rows, or, if given, so many columns of all rows."""

    rows: int
    columns: int | None


def _expect_inside(ids: Tensor, vocab_size: int, what: str) -> None:
    if is_cuda(ids):
        assert_on_device(((ids >= 0) & (ids < vocab_size)).all())
    elif ids.numel():
        wrong = next((number for number in map(int, ids.aminmax()) if not 0 <= number < vocab_size), None)
        if wrong is not None:
            raise IndexError(f"{what} is {wrong}, outside the vocabulary of {vocab_size}")


class _Loss(KeptGradients):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first: int,
        chunk: LogitsChunk,
        tp: TensorParallel,
        fused: bool,
    ) -> Tensor:
        whole = all_gather_sequence(hidden, tp.length, tp.group)() if tp.length else hidden.contiguous()
        rows, targets, with_gradients = whole.flatten(0, 1), targets.flatten(), any(ctx.needs_input_grad)
        if chunk.columns is not None:
            loss, grad_hidden, grad_weight = loss_by_columns(
                rows, weight, targets, chunk.columns, with_gradients=with_gradients, first=first,
                join=partial(all_gather_stacked, group=tp.group), compiled=fused,
            )  # fmt: skip
        elif with_gradients:
            grad_hidden, grad_weight = torch.empty_like(rows), torch.zeros_like(weight, dtype=wide_dtype(weight))
            loss = _sweep(rows, weight, targets, first, chunk.rows, tp.group, fused, grad_hidden, grad_weight)
        else:
            return _sweep(rows, weight, targets, first, chunk.rows, tp.group, fused, None, None)
        if grad_hidden is None or grad_weight is None:
            return loss
        grad_hidden = grad_hidden.view_as(whole)
        summed = sum_sequence(grad_hidden, tp.length, tp.group)
        narrow = grad_weight.to(weight.dtype)
        ctx.save_for_backward(summed(), narrow)
        return loss


def _sweep(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int,
    rows: int,
    group: dist.ProcessGroup,
    fused: bool,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> Tensor:
    """Loss of hidden [N, D], computed `rows` at a time in reused buffers; fills `grad_hidden` and adds to `grad_weight`."""
    loss = torch.zeros((), dtype=wide_dtype(hidden), device=hidden.device)
    buffer = hidden.new_empty(rows, len(weight))
    wide_buffer = torch.empty_like(buffer, dtype=loss.dtype) if buffer.dtype != loss.dtype else buffer
    product = torch.empty_like(weight) if buffer is not wide_buffer and grad_weight is not None else None
    passes = (_to_exponentials, _to_gradient)
    to_exponentials, to_gradient = map(compiled_once, passes) if fused else passes
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        chunk_hidden, chunk_targets = hidden[part], targets[part].unsqueeze(1)
        is_valid = chunk_targets != IGNORED  # [rows, 1]
        is_local = (chunk_targets >= first) & (chunk_targets < first + len(weight))
        index = torch.where(is_local, chunk_targets - first, 0)
        logits = torch.mm(chunk_hidden, weight.t(), out=buffer[: len(chunk_hidden)])
        wide = wide_buffer[: len(chunk_hidden)]
        if wide.dtype != logits.dtype:
            wide.copy_(logits)
        local_target_logits = wide.gather(1, index) * is_local
        local_stats = torch.cat((*to_exponentials(wide), local_target_logits), dim=1)  # [rows, 3]
        normalizer, row_losses = _join(all_gather_stacked(local_stats, group))
        loss += (row_losses * is_valid).sum()
        if grad_hidden is None or grad_weight is None:
            continue
        to_gradient(wide, torch.exp(local_stats[:, :1] - normalizer))
        wide.scatter_add_(1, index, -is_local.to(wide.dtype))
        grad = logits.copy_(wide) if wide.dtype != logits.dtype else wide
        torch.mm(grad, weight, out=grad_hidden[part]).masked_fill_(~is_valid, 0)
        counting = chunk_hidden.masked_fill(~is_valid, 0)
        if product is None:
            grad_weight.addmm_(grad.t(), counting)
        else:
            grad_weight += torch.mm(grad.t(), counting, out=product)
    return loss


def _join(ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the ranks' statistics [tp, rows, 3]: log-sum-exp over the whole vocabulary and the loss, [rows, 1] each."""
    maxima, sums, targets = ranks.unsqueeze(-2).unbind(-1)  # [tp, rows, 1] each
    highest = maxima.amax(0)
    normalizer = highest + (sums * torch.exp(maxima - highest)).sum(0).log()
    return normalizer, normalizer - targets.sum(0)


def _to_exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima of `logits` [rows, V/tp] and sums of exponentials relative to them, [rows, 1] each. `logits` become the
    exponentials."""
    maxima = logits.amax(1, keepdim=True)
    logits.sub_(maxima).exp_()
    return maxima, logits.sum(1, keepdim=True)


def _to_gradient(exponentials: Tensor, scale: Tensor) -> None:
    """Turn exponentials relative to this rank's maxima into probabilities, in place."""
    exponentials.mul_(scale)
