"""One decoder for GPT-2, Llama, Mistral, SmolLM and Qwen: pre-norm blocks of causal attention and an MLP.

Parameter names and shapes are those of `spec.weights`. The model is plain and knows nothing of ranks; what others replace or
wrap are attributes: `layers[i]`, `self_attn.core`, the norms, `loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ultrascale.kernels.attention import attention, attention_mask
from ultrascale.kernels.cross_entropy import linear_cross_entropy
from ultrascale.kernels.norm import rms_norm
from ultrascale.kernels.rotary import Angles, rotary_angles, rotate
from ultrascale.kernels.swiglu import swiglu
from ultrascale.spec.model import Model
from ultrascale.spec.trainable import expect_trainable


class KeyValues(Protocol):
    """Keys and values of one layer's earlier tokens."""

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add [B, S, K, E] each, and return all there are, [B, T, K, E]."""
        ...


class Cache(Protocol):
    """Keys and values of earlier tokens, so that only new ones are computed."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values all layers have."""
        ...

    @property
    def layers(self) -> Sequence[KeyValues]: ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads."""

    def __init__(self, model: Model):
        super().__init__()
        d, q, kv = model.hidden_size, model.query_size, model.key_value_size
        self.head_dim = model.head_dim
        self.q_proj = nn.Linear(d, q, bias=model.qkv_bias)
        self.k_proj = nn.Linear(d, kv, bias=model.qkv_bias)
        self.v_proj = nn.Linear(d, kv, bias=model.qkv_bias)
        self.q_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None
        self.o_proj = nn.Linear(q, d, bias=model.attention_output_bias)
        self.core = attention

    def forward(self, hidden: Tensor, angles: Angles | None, mask: Tensor | None, earlier: KeyValues | None = None) -> Tensor:
        query = self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [B, S, H, E]
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [B, S, K, E]
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [B, S, K, E]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if earlier is not None:
            key, value = earlier.extend(key, value)  # [B, T, K, E]
        return self.o_proj(self.core(query, key, value, mask).flatten(2))  # [B, S, D]


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Model):
        super().__init__()
        d, f = model.hidden_size, model.intermediate_size
        self.gate_proj = nn.Linear(d, f, bias=model.mlp_bias)
        self.up_proj = nn.Linear(d, f, bias=model.mlp_bias)
        self.down_proj = nn.Linear(f, d, bias=model.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))


class MLP(nn.Module):
    """GPT-2's: two projections with GELU (tanh form) between."""

    def __init__(self, model: Model):
        super().__init__()
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=model.mlp_bias)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=model.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))


class Block(nn.Module):
    """One decoder block: each half reads a normed copy of the residual stream and adds to it."""

    def __init__(self, model: Model):
        super().__init__()
        self.input_layernorm = _norm(model)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = _norm(model)
        self.mlp = GatedMLP(model) if model.gated_mlp else MLP(model)

    def forward(self, hidden: Tensor, angles: Angles | None, mask: Tensor | None, earlier: KeyValues | None = None) -> Tensor:
        """[B, S, D] to [B, S, D]; `angles` None: no rotary positions; `mask` None: plain causal."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, mask, earlier)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """The model that `model` describes. Build it under `torch.device("meta")` to allocate nothing; it has no buffers.

    Raises SpecError for a model that can be planned but not run.
    """

    def __init__(self, model: Model):
        expect_trainable(model)
        super().__init__()
        self.spec = model
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.embed_positions: nn.Embedding | None = None
        if model.position_embedding == "learned":
            self.embed_positions = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        self.layers = nn.ModuleList(Block(model) for _ in range(model.num_hidden_layers))
        self.norm = _norm(model)
        self.lm_head: nn.Linear | None = None
        if not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.loss = linear_cross_entropy

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The loss summed over targets != -100 (0-d, fp32 or fp64), or without targets the logits [B, S, V].

        tokens, targets [B, S] int64; positions [S] or [B, S], by default counted from the cached tokens on; document_ids [B, S]
        int: a token sees only its own document. With a cache, tokens follow the cached ones, whose keys and values are kept.
        Raises ValueError if document ids and a cache are given together.
        """
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids cannot be given with a cache: its earlier tokens carry no document ids")
        start = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        hidden = self.embed_tokens(tokens)  # [B, S, D]
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions)
        hidden = self._blocks(hidden, positions, document_ids, cache)
        hidden = self.norm(hidden)
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return F.linear(hidden, head) if targets is None else self.loss(hidden, head, targets)

    def _blocks(self, hidden: Tensor, positions: Tensor, document_ids: Tensor | None, cache: Cache | None) -> Tensor:
        spec, length = self.spec, hidden.shape[1]
        num_keys = length if cache is None else cache.length + length
        masks = {
            window: attention_mask(
                length, num_keys, document_ids=document_ids, window=window, dtype=hidden.dtype, device=hidden.device
            )
            for window in {spec.window(layer) for layer in range(spec.num_hidden_layers)}
        }
        angles = rotary_angles(spec, positions, hidden.dtype) if spec.position_embedding == "rotary" else None
        for index, layer in enumerate(self.layers):
            earlier = None if cache is None else cache.layers[index]
            hidden = layer(hidden, angles if spec.uses_rotary(index) else None, masks[spec.window(index)], earlier)
        return hidden


def _norm(model: Model) -> nn.Module:
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden_size, model.norm_eps)
    return nn.LayerNorm(model.hidden_size, model.norm_eps)
