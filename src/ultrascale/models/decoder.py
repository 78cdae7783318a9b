"""One decoder for GPT-2, Llama, Mistral, SmolLM and Qwen: pre-norm blocks of causal attention and an MLP.

Parameter names and shapes are those of `spec.weights`. A decoder may be one stage of the model: some of its blocks, with the
embedding if it is the first and the head if it is the last. The model is plain and knows nothing of ranks; what others replace
are attributes that hold functions:

    where        attribute   what it does here
    attention    fan_out     several projections of one input         fan_in   the projection back to the residual stream
    MLP          fan_out     the same                                 fan_in   the same
    attention    core        what queries gather from values
    decoder      look_up     rows of the embedding                    own_share   the part of a sequence that norms and
    decoder      make_mask   who sees whom, for `core`                            residuals here work on: all of it
    decoder      loss        head and loss in one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

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


def fan_out(hidden: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
    """Several projections of one input: of [B, S, D], [B, S, F] each."""
    return tuple(projection(hidden) for projection in projections)


def fan_in(inner: Tensor, projection: nn.Linear) -> Tensor:
    """The projection back to the residual stream: [B, S, F] to [B, S, D]."""
    return projection(inner)


def own_share(hidden: Tensor) -> Tensor:
    """All of it."""
    return hidden


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
        self.core, self.fan_out, self.fan_in = attention, fan_out, fan_in

    def forward(self, hidden: Tensor, angles: Angles | None, mask: Any, earlier: KeyValues | None = None) -> Tensor:
        projected = self.fan_out(hidden, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)  # [B, S, H, E], [B, S, K, E] twice
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        if earlier is not None:
            key, value = earlier.extend(key, value)  # [B, T, K, E]
        return self.fan_in(self.core(query, key, value, mask).flatten(2), self.o_proj)  # [B, S, D]


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Model):
        super().__init__()
        d, f = model.hidden_size, model.intermediate_size
        self.gate_proj = nn.Linear(d, f, bias=model.mlp_bias)
        self.up_proj = nn.Linear(d, f, bias=model.mlp_bias)
        self.down_proj = nn.Linear(f, d, bias=model.mlp_bias)
        self.fan_out, self.fan_in = fan_out, fan_in

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fan_in(swiglu(*self.fan_out(hidden, self.gate_proj, self.up_proj)), self.down_proj)


class MLP(nn.Module):
    """GPT-2's: two projections with GELU (tanh form) between."""

    def __init__(self, model: Model):
        super().__init__()
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=model.mlp_bias)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=model.mlp_bias)
        self.fan_out, self.fan_in = fan_out, fan_in

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fan_in(F.gelu(*self.fan_out(hidden, self.up_proj), approximate="tanh"), self.down_proj)


class Block(nn.Module):
    """One decoder block: each half reads a normed copy of the residual stream and adds to it."""

    def __init__(self, model: Model):
        super().__init__()
        self.input_layernorm = _norm(model)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = _norm(model)
        self.mlp = GatedMLP(model) if model.gated_mlp else MLP(model)

    def forward(self, hidden: Tensor, angles: Angles | None, mask: Any, earlier: KeyValues | None = None) -> Tensor:
        """[B, S, D] to [B, S, D]; `angles` None: no rotary positions; `mask`: what the decoder's `make_mask` made."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), angles, mask, earlier)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """The model that `model` describes, or the stage of it with these `layers`.

    Names are those of the whole model: `layers` is keyed by the blocks' numbers there. There are no buffers; built under
    `torch.device("meta")` it takes no memory. Raises SpecError for a model that can be planned but not run.
    """

    def __init__(self, model: Model, *, layers: range | None = None, is_first: bool = True, is_last: bool = True):
        expect_trainable(model)
        super().__init__()
        self.spec, self.is_first, self.is_last = model, is_first, is_last
        self.embed_tokens: nn.Embedding | None = None
        if is_first or (is_last and model.tie_word_embeddings):
            self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.embed_positions: nn.Embedding | None = None
        if is_first and model.position_embedding == "learned":
            self.embed_positions = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        numbers = range(model.num_hidden_layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(number): Block(model) for number in numbers})
        self.norm = _norm(model) if is_last else None
        self.lm_head: nn.Linear | None = None
        if is_last and not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.look_up, self.own_share, self.make_mask, self.loss = F.embedding, own_share, attention_mask, linear_cross_entropy

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Every block, with its number in the whole model."""
        for number, block in self.layers.items():
            yield int(number), cast(Block, block)

    def forward(
        self,
        inputs: Tensor,
        *,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The loss summed over targets != -100 (0-d, fp32 or fp64), or without targets the logits [B, S, V]; of a stage that is
        not the last, what the next one takes.

        inputs: tokens [B, S] int64, or [B, S, D] from the stage before; targets [B, S] int64; positions [S] or [B, S], by
        default counted from the cached tokens on; document_ids [B, S] int: a token sees only its own document. With a cache,
        tokens follow the cached ones, whose keys and values are kept.
        Raises ValueError if document ids and a cache are given together.
        """
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids cannot be given with a cache: its earlier tokens carry no document ids")
        start = 0 if cache is None else cache.length
        if positions is None:
            positions = torch.arange(start, start + inputs.shape[1], device=inputs.device)
        hidden = self._embed(inputs, positions) if self.is_first else inputs
        hidden = self._blocks(hidden, positions, document_ids, cache)
        if not self.is_last:
            return hidden
        assert self.norm is not None
        hidden, head = self.norm(hidden), self.head_weight
        return F.linear(hidden, head) if targets is None else self.loss(hidden, head, targets)

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: of the head, or of the embedding if they are one."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        return head.weight

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        assert self.embed_tokens is not None
        hidden = self.look_up(tokens, self.embed_tokens.weight)  # [B, S, D]
        if self.embed_positions is not None:
            hidden = hidden + self.own_share(self.embed_positions(positions).expand(len(tokens), -1, -1))
        return hidden

    def _blocks(self, hidden: Tensor, positions: Tensor, document_ids: Tensor | None, cache: Cache | None) -> Tensor:
        spec, length = self.spec, positions.shape[-1]
        num_keys = length if cache is None else cache.length + length
        masks = {
            window: self.make_mask(
                length, num_keys, document_ids=document_ids, window=window, dtype=hidden.dtype, device=hidden.device
            )
            for window in {spec.window(number) for number, _ in self.blocks()}
        }
        angles = rotary_angles(spec, positions, hidden.dtype) if spec.position_embedding == "rotary" else None
        for number, block in self.blocks():
            earlier = None if cache is None else cache.layers[number]
            hidden = block(hidden, angles if spec.uses_rotary(number) else None, masks[spec.window(number)], earlier)
        return hidden


def _norm(model: Model) -> nn.Module:
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden_size, model.norm_eps)
    return nn.LayerNorm(model.hidden_size, model.norm_eps)
