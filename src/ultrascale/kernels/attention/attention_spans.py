"""Attention within documents given by their ends (varlen flash attention): no mask, and no masked score is computed.

    ends      0  5  9  16      in all B*S tokens, sequence after sequence: documents are [0, 5), [5, 9), [9, 16)

A mask is S^2 numbers per sequence, in bf16 128 MiB at 8,192 tokens, and a kernel that reads it computes the full square.
Variable-length flash attention (Dao et al. 2022; torch's and the flash-attn packages' `varlen`) skips what lies outside a
document or a sliding window. It supports 16 bits on CUDA; elsewhere documents are computed one by one, exact in fp64 and slow.
Key heads may be fewer than query heads, and are not repeated.

The document lengths are not copied to the host: the batch brings `ends` (`packed_ids`), padded with empty documents, so that a
compiler sees few shapes. Where only ids are given the host must wait for them, once a micro-batch.

Saves for the backward pass the same as attention without documents. Under `torch.use_deterministic_algorithms` its gradients
have the same bits every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.attention.attention_with_lse import attend, attend_backward, hidden_score, one_width
from ultrascale.kernels.attention.flash_packages import flash_backward, flash_forward
from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.kernels.choice.wide import wide_dtype

ENDS_MULTIPLE = 64
"""Multiple to which the number of documents of a micro-batch is padded, with empty ones."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)

_aten = torch.ops.aten


class PackedIds(NamedTuple):
    """Document of each token, as ids and as document ends."""

    ids: Tensor
    """Document ids [B, S] int: 0, 1, 2, ... in each sequence."""
    ends: Tensor
    """[documents + 1] int32: start of each document among all tokens, then B*S."""


class Spans(NamedTuple):
    """The tokens that each token sees: itself and earlier ones of its document, at most `window` in all."""

    ends: Tensor | None
    """Ends as in `PackedIds`; None if every sequence is one document."""
    window: int | None
    core: str = ""
    """Flash attention package, a key of `flash_packages.MODULES`; empty: torch's own."""


def packed_ids(ids: Tensor, device: torch.device) -> Tensor | PackedIds:
    """Document ids for a decoder on `device`, from ids [B, S] on the host; on CUDA as `PackedIds`."""
    moved = ids.to(device, non_blocking=True)
    return PackedIds(moved, _ends(ids).to(device, non_blocking=True)) if is_cuda(device) else moved


def ends_of(documents: Tensor | PackedIds) -> Tensor:
    """Document ends [documents + 1] int32 on the ids' device; if only ids are given the host waits for them."""
    return documents.ends if isinstance(documents, PackedIds) else _ends(documents)


def _ends(ids: Tensor) -> Tensor:
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = begins.flatten().nonzero().squeeze(1).int()
    return F.pad(starts, (0, 1 + -len(starts) % ENDS_MULTIPLE), value=ids.numel())


def attend_spans(query: Tensor, key: Tensor, value: Tensor, spans: Spans, *, scale: float) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, E'], lse [H, B*S]) of queries [B, S, H, E] over keys [B, S, K, E] and values [B, S, K, E'].

    lse is fp32, or fp64 if the queries are.
    """
    if spans.core:
        return _attend_by_package(query, key, value, spans, scale)
    ends, width = _all_ends(query, spans), value.shape[-1]
    if not _runs_flash(query):
        return _attend_by_document(query, key, value, ends, spans.window, scale)
    length = query.shape[1]
    query, key, value = one_width(query, key, value)
    out, lse, *_ = _aten._flash_attention_forward(
        *(tensor.flatten(0, 1) for tensor in (query, key, value)), ends, ends, length, length, 0.0, True, False, scale=scale,
        **_sides(spans.window),
    )  # fmt: skip
    out = out.unflatten(0, (-1, length))
    return out if out.shape[-1] == width else out[..., :width].contiguous(), lse


def attend_spans_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values. `out` and `lse` may be those of a softmax with further terms, such as a sink."""
    if spans.core:
        return _gradients_by_package(grad_out, query, key, value, out, lse, spans, scale)
    ends = _all_ends(query, spans)
    if not _runs_flash(query):
        return _gradients_by_document(grad_out, query, key, value, out, lse, ends, spans.window, scale)
    widths, length = (query.shape[-1], key.shape[-1], value.shape[-1]), query.shape[1]
    padded = [tensor.flatten(0, 1) for tensor in one_width(grad_out, query, key, value, out)]
    no_seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # read with dropout only
    grads = _aten._flash_attention_backward(
        *padded, lse, ends, ends, length, length, 0.0, True, no_seed,
        torch.empty(0, dtype=torch.uint64, device=query.device), scale=scale, **_sides(spans.window),
    )  # fmt: skip
    of_query, of_key, of_value = (
        grad.unflatten(0, (-1, length))[..., :width] for grad, width in zip(grads, widths, strict=True)
    )
    return of_query, of_key, of_value


def _attend_by_package(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    length, width = query.shape[1], value.shape[-1]
    packed = _packed_inputs(spans, query, key, value)
    out, lse = flash_forward(*packed, spans.ends, length, True, spans.window or 0, scale, spans.core)
    if spans.ends is None:
        return out[..., :width].contiguous(), lse.transpose(0, 1).flatten(1)  # of [B, H, S]
    return out.unflatten(0, (-1, length))[..., :width].contiguous(), lse


def _gradients_by_package(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    length, packed = query.shape[1], _packed_inputs(spans, grad_out, query, key, value, out)
    if spans.ends is None:
        lse = lse.unflatten(1, (-1, length)).transpose(0, 1).contiguous()  # [B, H, S]
    grads = flash_backward(*packed, lse, spans.ends, length, True, spans.window or 0, scale, spans.core)
    of_query, of_key, of_value = (
        grad.reshape(*tensor.shape[:3], -1)[..., : tensor.shape[3]]
        for grad, tensor in zip(grads, (query, key, value), strict=True)
    )
    return of_query, of_key, of_value


def _packed_inputs(spans: Spans, *tensors: Tensor) -> list[Tensor]:
    """Tensors in the form that the packages take: packed if documents are given."""
    return [(tensor if spans.ends is None else tensor.flatten(0, 1)).contiguous() for tensor in one_width(*tensors)]


def _all_ends(query: Tensor, spans: Spans) -> Tensor:
    if spans.ends is not None:
        return spans.ends
    batch, length = query.shape[:2]
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)


def _runs_flash(query: Tensor) -> bool:
    return is_cuda(query) and query.dtype in FLASH_DTYPES


def _sides(window: int | None) -> dict[str, int]:
    """Window arguments: of w tokens, w - 1 are to the left."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _documents(ends: Tensor, length: int) -> Iterator[tuple[int, slice]]:
    """(sequence, positions in it) of every document that is not empty."""
    bounds = ends.tolist()
    for start, end in pairwise(bounds):
        if end > start:
            yield start // length, slice(start % length, start % length + end - start)


def _window_mask(length: int, window: int | None, like: Tensor) -> Tensor | None:
    if window is None or window >= length:
        return None
    distance = torch.arange(length, device=like.device)[:, None] - torch.arange(length, device=like.device)
    mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_((distance < 0) | (distance >= window), hidden_score(like.dtype))[None, None]


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors)  # [L, H, E] to [1, H, L, E]


def _attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    batch, length, heads = query.shape[:3]
    out = query.new_empty(batch, length, heads, value.shape[-1])
    wide = wide_dtype(query)
    lse = query.new_empty(heads, batch, length, dtype=wide)
    for row, part in _documents(ends, length):
        q, k, v = _heads_first(query[row, part], key[row, part], value[row, part])
        mask = _window_mask(part.stop - part.start, window, query)
        part_out, part_lse = attend(q, k, v, mask=mask, is_causal=mask is None, scale=scale)
        out[row, part], lse[:, row, part] = part_out[0].transpose(0, 1), part_lse[0]
    return out, lse.flatten(1)


def _gradients_by_document(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor, window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    length = query.shape[1]
    totals = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    rows = lse.unflatten(1, (-1, length))
    for row, part in _documents(ends, length):
        of_out, q, k, v, o = _heads_first(*(tensor[row, part] for tensor in (grad_out, query, key, value, out)))
        mask, part_lse = _window_mask(part.stop - part.start, window, query), rows[:, row, part][None]
        grads = attend_backward(of_out, q, k, v, o, part_lse, mask=mask, is_causal=mask is None, scale=scale)
        for total, grad in zip(totals, grads, strict=True):
            total[row, part] = grad[0].transpose(0, 1)
    return totals[0], totals[1], totals[2]
