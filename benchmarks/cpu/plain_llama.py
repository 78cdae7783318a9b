"""A small Llama and its training loop as a good PyTorch person writes them without a framework: the yardstick."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCAB_SIZE, HIDDEN, FFN, LAYERS, HEADS, SEQUENCE, SEQUENCES = 8192, 256, 768, 4, 4, 256, 8


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021) on [B, H, S, E], halves convention."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.unflatten(2, (3, -1, HIDDEN // HEADS)).permute(2, 0, 3, 1, 4)  # [B, H, S, E] each
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)
        head_dim = HIDDEN // HEADS
        inverse = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(SEQUENCE), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._init)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def training_step(
    model: nn.Module, batch: Callable[[], tuple[torch.Tensor, torch.Tensor]], *, bf16: bool
) -> Callable[[], float]:
    """A function that trains one step and returns the loss: fused AdamW, decay on matrices, clipping at 1, autocast."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        tokens, targets = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
