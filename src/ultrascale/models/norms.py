"""RMSNorm as a module, and the norm a model has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.norm import add_rms_norm, fuses_sums, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def unchanged(x: Tensor) -> Tensor:
    """x, where there is no norm."""
    return x


def norm_of_sum(norm: Callable[[Tensor], Tensor], x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + added), x + added), both [..., D]; by one kernel where the run has one (`kernels.norm.add_rms_norm`)."""
    if isinstance(norm, RMSNorm) and "forward" not in vars(norm) and fuses_sums(x):  # or one that is made again alone
        return add_rms_norm(x, added, norm.weight, norm.eps)
    total = x + added
    del added  # it would stay while the norm is computed
    return norm(total), total


def build_norm(model: Model) -> nn.Module:
    """The model's norm over the hidden size."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden_size, model.norm_eps)
    return nn.LayerNorm(model.hidden_size, model.norm_eps)
