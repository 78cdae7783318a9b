"""Attention over a part of the keys, with what is needed to merge parts: out, and the log-sum-exp of each row's scores.

    out    softmax over these keys only, times their values
    lse    log of the sum of exp(scores): a part's weight is exp(lse) over the sum of all parts' exp(lse)

Parts merge exactly (Milakov and Gimelshein 2018; Dao et al. 2022): lse = log(exp(lse_a) + exp(lse_b)), and out is the mean of
out_a and out_b weighted by exp(lse_a) and exp(lse_b). In the backward pass each part is computed separately with the *merged*
out and lse: the probabilities exp(scores - lse) are then those of the whole softmax, and the parts' gradients add up.

Kernels: a flash-attn package's for parts without a mask, if the run uses one. Otherwise torch's: on CPU its flash attention,
with or without a mask; on CUDA flash attention for 16 bits without a mask, memory-efficient attention for fp32 or a mask; plain
matrix products otherwise (fp64 on CUDA). Tensors here are [B, H, S, E], heads before positions, as the kernels have them. There
may be fewer key/value heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.kernels.attention.flash_packages import flash_backward, flash_forward
from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.work.attention_work import BIAS_MULTIPLE
from ultrascale.work.ops import HEAD_DIM_MULTIPLE

_aten = torch.ops.aten
_LSE_MULTIPLE = 32
"""Memory-efficient attention pads rows of log-sum-exp to a multiple of this (`kAlignLSE`)."""


def hidden_score(dtype: torch.dtype) -> float:
    """Value added to the scores of masked keys. Finite, so that a row that sees no key of a part gives no NaN: its lse is as
    low as this, and merged with any other part it weighs exactly 0."""
    return max(-1e30, torch.finfo(dtype).min / 2)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask that `attend` takes, [1 or B, 1, S, T] in `dtype`, from booleans [1 or B, S, T]."""
    *rows, num_keys = visible.shape
    padding = -num_keys % BIAS_MULTIPLE if is_cuda(visible) else 0
    mask = torch.zeros(*rows, num_keys + padding, dtype=dtype, device=visible.device)[..., :num_keys]
    return mask.masked_fill_(visible.logical_not(), hidden_score(dtype)).unsqueeze(1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    core: str = "",
) -> tuple[Tensor, Tensor]:
    """(out [B, H, S, E'], lse [B, H, S]) of queries [B, H, S, E] over keys [B, K, T, E] and values [B, K, T, E'].

    `mask` [1 or B, 1, S, T] of the same dtype is added to the scores; `is_causal` requires T = S and no mask; `scale` is 1 /
    sqrt(E) by default; `core`: a flash attention package for calls without a mask (`kernels.attention.flash_packages`). lse is
    fp32, or fp64 if the queries are.
    """
    scale, width = _scale(query, scale), value.shape[-1]
    if core and mask is None:
        out, lse = flash_forward(*_places_first(query, key, value), None, key.shape[2], is_causal, 0, scale, core)
        return out.transpose(1, 2)[..., :width], lse
    if _needs_plain(query):
        return _plain(query, key, value, mask, is_causal, scale)
    query, key, value = one_width(query, key, value, multiple=_multiple(query))
    if not is_cuda(query):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    elif _runs_flash(query, mask):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    else:
        key, value = _repeated(query, key, value)
        bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(query, key, value, bias, True, 0.0, is_causal, scale=scale)
        lse = lse[..., : query.shape[2]]
    return out[..., :width], lse


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    core: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """One part's contribution to the gradients of queries, keys and values; `out` and `lse` are those of all parts merged."""
    scale = _scale(query, scale)
    widths = (query.shape[-1], key.shape[-1], value.shape[-1])
    if core and mask is None:
        tensors = _places_first(grad_out, query, key, value, out)
        packed_grads = flash_backward(*tensors, lse.contiguous(), None, key.shape[2], is_causal, 0, scale, core)
        of_query, of_key, of_value = (
            grad.transpose(1, 2)[..., :width] for grad, width in zip(packed_grads, widths, strict=True)
        )
        return of_query, of_key, of_value
    if _needs_plain(query):
        return _plain_backward(grad_out, query, key, value, out, lse, mask, is_causal, scale)
    heads = key.shape[1]
    query, key, value, out, grad_out = one_width(query, key, value, out, grad_out, multiple=_multiple(query))
    if not is_cuda(query):
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    elif _runs_flash(query, mask):
        grads = _flash_backward(grad_out, query, key, value, out, lse, is_causal, scale)
    else:
        grads = _efficient_backward(grad_out, query, key, value, out, lse, mask, is_causal, scale)
    grad_query, grad_key, grad_value = (grad[..., :width] for grad, width in zip(grads, widths, strict=True))
    return grad_query, _summed(grad_key, heads), _summed(grad_value, heads)


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into `out` [B, H, S, E] and `lse` [B, H, S], in place. The part's dtype may be narrower than out's."""
    weight = torch.sigmoid(part_lse - lse).to(out.dtype).unsqueeze(-1)
    out.lerp_(part.to(out.dtype), weight)
    torch.logaddexp(lse, part_lse, out=lse)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _multiple(query: Tensor) -> int:
    return HEAD_DIM_MULTIPLE if is_cuda(query) else 1


def _needs_plain(query: Tensor) -> bool:
    return is_cuda(query) and query.dtype == torch.float64


def _runs_flash(query: Tensor, mask: Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.bfloat16, torch.float16)


def one_width(*tensors: Tensor, multiple: int = HEAD_DIM_MULTIPLE) -> tuple[Tensor, ...]:
    """Tensors zero-padded to one head dimension, which the kernels require; it changes no score and no other column of the
    result."""
    width = max(tensor.shape[-1] for tensor in tensors)
    width += -width % multiple
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)


def _places_first(*tensors: Tensor) -> list[Tensor]:
    """Tensors as [B, S, H, E] with one head dimension, as the packages take them."""
    return [tensor.transpose(1, 2).contiguous() for tensor in one_width(*tensors)]


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Gradient of repeated heads, summed to the original heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    no_lengths, no_seed = None, torch.empty(2, dtype=torch.uint64, device=query.device)  # read with dropout only
    return _aten._scaled_dot_product_flash_attention_backward(
        grad_out, query, key, value, out, lse.contiguous(), no_lengths, no_lengths, query.shape[2], key.shape[2], 0.0,
        is_causal, no_seed, torch.empty(0, dtype=torch.uint64, device=query.device), scale=scale,
    )  # fmt: skip


def _efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    key, value = _repeated(query, key, value)
    bias = None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
    lse = F.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=float("inf"))
    no_seed = torch.empty((), dtype=torch.int64, device=query.device)  # read with dropout only
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, key, value, bias, out, lse, no_seed, no_seed, 0.0, [True, True, True, False], is_causal, scale=scale
    )
    return grads[:3]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = query @ key.transpose(-1, -2) * scale  # [B, H, S, T]
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, hidden_score(scores.dtype))
    return scores if mask is None else scores + mask


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    key, value = _repeated(query, key, value)
    scores = _scores(query, key, mask, is_causal, scale)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def _plain_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads = key.shape[1]
    key, value = _repeated(query, key, value)
    probabilities = (_scores(query, key, mask, is_causal, scale) - lse.unsqueeze(-1)).exp()
    grad_value = probabilities.transpose(-1, -2) @ grad_out
    change = grad_out @ value.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)
    grad_scores = probabilities * change * scale
    grad_key = grad_scores.transpose(-1, -2) @ query
    return grad_scores @ key, _summed(grad_key, heads), _summed(grad_value, heads)
