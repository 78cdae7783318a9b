"""A Llama with grouped queries as a good PyTorch person writes it for torch.compile: the yardstick of `step_speed.py`.

Rotary positions in every layer, also for SmolLM3, which leaves them out of each fourth: a fraction of a percent of its time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, model: Model):
        super().__init__()
        d, f, self.head_dim = model.hidden_size, model.intermediate_size, model.head_dim
        self.q, self.k = model.num_attention_heads * self.head_dim, model.num_key_value_heads * self.head_dim
        self.attention_norm, self.mlp_norm = Norm(d, model.norm_eps), Norm(d, model.norm_eps)
        self.qkv = nn.Linear(d, self.q + 2 * self.k, bias=False)
        self.out = nn.Linear(self.q, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        parts = self.qkv(self.attention_norm(x)).split((self.q, self.k, self.k), dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)  # [B, H or K, S, E]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainDecoder(nn.Module):
    """Tokens to the mean loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model):
        super().__init__()
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_hidden_layers))
        self.norm = Norm(model.hidden_size, model.norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if model.tie_word_embeddings:
            self.head.weight = self.embed.weight
        inverse = model.rope_theta ** (-torch.arange(0, model.head_dim, 2) / model.head_dim)
        angles = torch.outer(torch.arange(8192), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """[B, S] each, S at most 8192, to 0-d."""
        x, length = self.embed(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) on [B, H, S, E], halves convention, in the dtype of `x`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
