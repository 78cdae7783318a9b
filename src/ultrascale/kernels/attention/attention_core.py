"""The attention core: softmax(q k^T / sqrt(E)) v over the visible keys. One function, several kernels.

The type of mask that `attention_mask` builds from documents and a sliding window selects the kernel:

    None        plain causal: torch's SDPA (flash, cuDNN or memory-efficient attention), which skips the masked half
    Causal      the same, by one requested kernel of SDPA
    Spans       document ends, and a window: variable-length flash attention (`kernels.attention.attention_spans`), torch's or
                a package's (`kernels.attention.flash_packages`); a package's also where nothing is masked
    FlexMask    blocks of 128 x 128, partly or fully visible: compiled FlexAttention (`kernels.attention.attention_flex`)
    a tensor    added to the scores, 0 or -inf, [1 or B, 1, S, S] in the activations' dtype, shared by all layers

By default 16 bits on CUDA use spans; everything else uses a tensor. A CUDA run sets the core that was fastest at its shapes
(`kernels.attention.attention_contest`). (From a boolean mask SDPA would build, and save, a float mask anew in every layer.) On
CPU one causal call per document was measured (torch 2.13, one thread): 3 times slower at 51 tokens a document, 2 times faster
at 200 (fp32), even in bf16; it cannot be compiled, so the CPU uses the tensor mask.

A sink is a score per head that takes attention weight and has no value (GPT-OSS). Plain attention's result is scaled down by
the weight that the sink takes, which follows from the log-sum-exp; the kernel's own backward pass, given the smaller result and
the larger log-sum-exp, yields the right gradients (`kernels.attention.attention_with_lse`).

Saves for the backward pass: query, key, value, the output, a mask if it is a tensor, and one fp32 (or fp64) number per head and
row. Values narrower than queries (latent attention) are zero-padded during the call where a kernel supports only one width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrascale.description.layout import AttentionCore
from ultrascale.kernels.attention.attention_flex import FlexMask, attend_flex, flex_mask
from ultrascale.kernels.attention.attention_spans import (
    FLASH_DTYPES,
    PackedIds,
    Spans,
    attend_spans,
    attend_spans_backward,
    ends_of,
)
from ultrascale.kernels.attention.attention_with_lse import attend, attend_backward
from ultrascale.kernels.attention.flash_packages import MODULES
from ultrascale.kernels.choice.device_kind import is_cuda


class Causal(NamedTuple):
    """Plain causal mask: a token sees itself and all earlier ones."""

    core: AttentionCore
    """SDPA kernel to use: a key of `SDPA_KERNELS`."""


Mask = Tensor | Spans | FlexMask | Causal | None
SDPA_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention: [B, S, H, E'] from queries [B, S, H, E], keys [B, T, K, E] and values [B, T, K, E'].

    `mask`: from `attention_mask`; a tensor [1 or B, 1, S, T] of the same dtype is added to the scores; None: causal, and T
    equals S. Query head h reads key/value head h // (H/K). `sinks` [H] or None; `scale` of the scores is 1 / sqrt(E) by
    default.
    """
    scale = float(query.shape[-1] ** -0.5) if scale is None else scale
    if isinstance(mask, FlexMask):
        return attend_flex(query, key, value, mask, sinks=sinks, scale=scale)
    if isinstance(mask, Spans):
        return _SpansAttention.apply(query, key, value, mask.ends, mask.window, mask.core, sinks, scale)  # pyright: ignore[reportReturnType]
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(mask, Causal):
        return _by_one_kernel(query, key, value, SDPA_KERNELS[mask.core], scale)
    if sinks is not None or (value.shape[-1] != query.shape[-1] and not is_cuda(query)):
        return _Attention.apply(query, key, value, mask, sinks, scale, "")  # pyright: ignore[reportReturnType]
    repeats = query.shape[1] // key.shape[1]
    fused_groups = repeats > 1 and _runs_grouped(query, mask)
    if repeats > 1 and not fused_groups:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=fused_groups, scale=scale
    )
    return out.transpose(1, 2)  # [B, S, H, E']


def _by_one_kernel(query: Tensor, key: Tensor, value: Tensor, kernel: SDPBackend, scale: float) -> Tensor:
    """Attention by one SDPA kernel: [B, H, S, E] to [B, S, H, E']. Raises RuntimeError if that kernel cannot run."""
    grouped = query.shape[1] != key.shape[1]
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, scale=scale)
    return out.transpose(1, 2)


def causal_piece(query: Tensor, key: Tensor, value: Tensor, core: str) -> Tensor:
    """Plain causal attention by the kernel that context parallelism uses for parts (`attention_with_lse`): [B, S, H, E']."""
    heads_first = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return _Attention.apply(*heads_first, None, None, None, core)  # pyright: ignore[reportReturnType]


def attention_mask(
    num_queries: int,
    num_keys: int,
    *,
    document_ids: Tensor | PackedIds | None,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    core: AttentionCore = "auto",
) -> Mask:
    """Mask of the last `num_queries` of `num_keys` positions, in the form that `core` takes; None: plain causal, by SDPA.

    A token sees itself and earlier ones of its own document (`document_ids` [B, T]), at most `window` positions in all. A
    tensor mask is added to the scores, [1 or B, 1, S, T]; with a cache (T > S) the mask is always a tensor.
    """
    if window is not None and window >= num_keys:
        window = None
    if num_queries == num_keys:
        if core == "flex":
            return flex_mask(num_keys, document_ids=_ids(document_ids), window=window, device=device)
        if core in MODULES:
            return Spans(None if document_ids is None else ends_of(document_ids), window, core)
        if document_ids is None and window is None:
            return Causal(core) if core in SDPA_KERNELS else None
        assert core not in SDPA_KERNELS, "refused before: description.attention_cores"
        if core == "varlen" or (core == "auto" and is_cuda(device) and dtype in FLASH_DTYPES):
            return Spans(None if document_ids is None else ends_of(document_ids), window)
    document_ids = _ids(document_ids)
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :].unsqueeze(1)  # [S, 1]
    hidden = keys > queries  # [S, T]
    if window is not None:
        hidden = hidden | (keys <= queries - window)
    hidden = hidden.unsqueeze(0)  # [1, S, T]
    if document_ids is not None:
        hidden = hidden | (document_ids[:, num_keys - num_queries :, None] != document_ids[:, None, :])  # [B, S, T]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)


def _ids(documents: Tensor | PackedIds | None) -> Tensor | None:
    return documents.ids if isinstance(documents, PackedIds) else documents


def _runs_grouped(query: Tensor, mask: Tensor | None) -> bool:
    """True if a fused kernel takes fewer key/value heads than query heads; the fallback would save S^2 scores per head.

    On CPU always: 1.1 times as fast as repeating the heads. On CUDA only flash attention: 16-bit, without a mask.
    """
    return not is_cuda(query) or (mask is None and query.dtype in (torch.bfloat16, torch.float16))


class _Attention(torch.autograd.Function):
    """[B, H, S, E] each, sinks [H] or None, to [B, S, H, E'].

    Handles what SDPA cannot: sinks, and on the CPU values narrower than queries, which are saved without padding.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float | None,
        core: str,
    ) -> Tensor:  # fmt: skip
        out, lse = attend(query, key, value, mask=mask, is_causal=mask is None, scale=scale, core=core)  # [B, H, S]
        if sinks is not None:
            score = sinks.to(lse.dtype)[:, None]
            out = out * torch.sigmoid(lse - score).to(out.dtype).unsqueeze(-1)
            lse = torch.logaddexp(lse, score)
        out = out.transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, mask, sinks, out, lse)
        ctx.options = {"is_causal": mask is None, "scale": scale, "core": core}
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, out, lse = ctx.saved_tensors
        grad, out = grad.transpose(1, 2), out.transpose(1, 2)
        grads = attend_backward(grad, query, key, value, out, lse, mask=mask, **ctx.options)
        if sinks is None:
            return *grads, None, None, None, None
        share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # of each row's weight, [B, H, S]
        along = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype))
        return *grads, None, -(share * along).sum((0, 2)).to(sinks.dtype), None, None


class _SpansAttention(torch.autograd.Function):
    """[B, S, H, E] each, ends [n + 1] or None, sinks [H] or None, to [B, S, H, E']."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor | None,
        window: int | None,
        core: str,
        sinks: Tensor | None,
        scale: float,
    ) -> Tensor:
        out, lse = attend_spans(query, key, value, Spans(ends, window, core), scale=scale)  # lse [H, B*S]
        if sinks is not None:
            score = sinks.to(lse.dtype)[:, None]
            share = torch.sigmoid(lse - score).to(out.dtype).t().reshape(*out.shape[:3], 1)
            out, lse = out * share, torch.logaddexp(lse, score)
        ctx.save_for_backward(query, key, value, ends, sinks, out, lse)
        ctx.window, ctx.core, ctx.scale = window, core, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, ends, sinks, out, lse = ctx.saved_tensors
        spans = Spans(ends, ctx.window, ctx.core)
        grads = attend_spans_backward(grad, query, key, value, out, lse, spans, scale=ctx.scale)
        if sinks is None:
            return *grads, None, None, None, None, None
        share = (sinks.to(lse.dtype)[:, None] - lse).exp()  # of each row's weight, [H, B*S]
        along = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype)).flatten(0, 1).t()
        return *grads, None, None, None, -(share * along).sum(1).to(sinks.dtype), None
