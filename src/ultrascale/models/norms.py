"""RMSNorm as a module, and the norm a model has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ultrascale.kernels.norm import rms_norm
from ultrascale.spec.model import Model


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def build_norm(model: Model) -> nn.Module:
    """Over the hidden size."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden_size, model.norm_eps)
    return nn.LayerNorm(model.hidden_size, model.norm_eps)
