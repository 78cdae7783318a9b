"""Attention layers: grouped-query attention, and DeepSeek's latent attention (MLA), whose keys and values come from one
low-rank projection."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.attention.attention_core import attention
from ultrascale.kernels.rotary import Angles, rotate, score_factor
from ultrascale.models.feed_forward import column_linear, row_linear
from ultrascale.models.norms import build_rms_norm

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention, whatever the epsilon of the model's other norms: as in the code of transformers
and DeepSeek."""


class KeyValues(Protocol):
    """KV cache of one layer: keys and values of earlier tokens."""

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys [B, S, K, E] and values [B, S, K, E']; returns all keys and values so far, [B, T, K, E] and [B, T, K,
        E']."""
        ...


def gather_sequence(shares: Tensor) -> Tensor:
    """The whole sequence: without parallelism nothing is sharded."""
    return shares


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, model: Model):
        super().__init__()
        d, q, kv = model.hidden_size, model.query_size, model.key_value_size
        self.head_dim, self.norms_whole = model.head_dim, model.qk_norm_whole
        self.q_proj = nn.Linear(d, q, bias=model.qkv_bias)
        self.k_proj = nn.Linear(d, kv, bias=model.qkv_bias)
        self.v_proj = nn.Linear(d, kv, bias=model.qkv_bias)
        sizes = (q, kv) if model.qk_norm_whole else (model.head_dim, model.head_dim)
        self.q_norm = build_rms_norm(model, sizes[0]) if model.qk_norm else None
        self.k_norm = build_rms_norm(model, sizes[1]) if model.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(model.num_attention_heads)) if model.attention_sinks else None
        self.o_proj = nn.Linear(q, d, bias=model.attention_output_bias)
        self.scale = (model.query_pre_attn_scalar or model.head_dim) ** -0.5 * score_factor(model.rope_scaling)
        self.core, self.column_linear, self.row_linear = attention, column_linear, row_linear

    def forward(self, hidden: Tensor, angles: Angles | None, mask: Any, earlier: KeyValues | None = None) -> Tensor:
        query, key, value = self.column_linear(hidden, self.q_proj, self.k_proj, self.v_proj)
        if self.norms_whole:
            query, key = self._normed(query, key)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in (query, key, value))  # [B, S, H or K, E]
        if not self.norms_whole:
            query, key = self._normed(query, key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if earlier is not None:
            key, value = earlier.extend(key, value)  # [B, T, K, E]
        gathered = self.core(query, key, value, mask, sinks=self.sinks, scale=self.scale)
        return self.row_linear(gathered.flatten(2), self.o_proj)  # [B, S, D]

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)


class LatentAttention(nn.Module):
    """Queries, keys and values through low-rank projections (MLA; DeepSeek-V2, section 2.1).

    Of a head's dimensions, RoPE leaves N as they are and rotates R; the keys' R rotated dimensions are shared by all heads.

        hidden -- q_a_proj, norm, q_b_proj ------------> queries [H, N+R]        or q_proj alone
        hidden -- kv_a_proj_with_mqa --+-- norm, kv_b_proj --> keys [H, N], values [H, E']
                                       '-- rotated ----------> keys [1, R]

    Low-rank projections and their norms run on a `sequence_shard`; `gather_sequence` brings the shared key to every rank.
    """

    def __init__(self, model: Model):
        super().__init__()
        d, heads, q_rank, kv_rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank, model.kv_lora_rank
        assert kv_rank is not None
        self.head_dim, self.still_dim, self.value_dim = model.head_dim, model.qk_nope_head_dim, model.v_head_dim
        self.scale = model.head_dim**-0.5 * score_factor(model.rope_scaling)
        if q_rank is None:
            self.q_proj = nn.Linear(d, model.query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(d, q_rank, bias=model.qkv_bias)
            self.q_a_layernorm = build_rms_norm(model, q_rank, LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(q_rank, model.query_size, bias=False)
        self.is_q_narrow, self.kv_rank = q_rank is not None, kv_rank
        self.kv_a_proj_with_mqa = nn.Linear(d, kv_rank + model.qk_rope_head_dim, bias=model.qkv_bias)
        self.kv_a_layernorm = build_rms_norm(model, kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (model.qk_nope_head_dim + model.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * model.v_head_dim, d, bias=model.attention_output_bias)
        self.core, self.column_linear, self.row_linear, self.gather_sequence = (
            attention,
            column_linear,
            row_linear,
            gather_sequence,
        )

    def forward(self, hidden: Tensor, angles: Angles | None, mask: Any, earlier: KeyValues | None = None) -> Tensor:
        assert angles is not None
        if self.is_q_narrow:
            query = self.widen_queries(self.q_a_layernorm(self.q_a_proj(hidden)), angles)  # [B, S, H, N+R]
        else:
            query = self._turned(self.column_linear(hidden, self.q_proj)[0], angles)
        latent, shared = self.kv_a_proj_with_mqa(hidden).split((self.kv_rank, self.head_dim - self.still_dim), -1)
        key, value = self.widen_keys(self.kv_a_layernorm(latent), shared, angles)
        if earlier is not None:
            key, value = earlier.extend(key, value)
        return self.row_linear(self.core(query, key, value, mask, scale=self.scale).flatten(2), self.o_proj)

    def widen_queries(self, narrow: Tensor, angles: Angles) -> Tensor:
        """[B, S, q_lora_rank] to queries [B, S, H, N+R]."""
        return self._turned(self.column_linear(narrow, self.q_b_proj)[0], angles)

    def _turned(self, query: Tensor, angles: Angles) -> Tensor:
        return rotate(query.unflatten(-1, (-1, self.head_dim)), angles, start=self.still_dim, neighbours=True)

    def widen_keys(self, latent: Tensor, shared: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """[B, S, kv_lora_rank] and the shared key [B, S, R] to keys [B, S, H, N+R] and values [B, S, H, E']."""
        (key_value,) = self.column_linear(latent, self.kv_b_proj)
        still, value = key_value.unflatten(-1, (-1, self.still_dim + self.value_dim)).split(
            (self.still_dim, self.value_dim), -1
        )
        turned = rotate(self.gather_sequence(shared).unsqueeze(2), angles, neighbours=True)  # [B, S, 1, R]
        key = torch.cat((still, turned.expand(-1, -1, still.shape[2], -1)), dim=-1)  # [B, S, H, N+R]
        return key, value.contiguous()  # a view would keep the keys in memory for the backward pass
