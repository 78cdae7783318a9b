"""RMSNorm as a module, and a builder for a model's norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.choice.wide import at_least_fp32
from ultrascale.kernels.norm import add_rms_norm, fuses_sums, rms_norm


class RMSNorm(nn.Module):
    """x / rms(x) * weight, or * (1 + weight) where weights are centered at zero."""

    def __init__(self, size: int, eps: float, *, zero_centered: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.zero_centered = eps, zero_centered

    @property
    def scale(self) -> Tensor:
        """Factors of the normalised elements, [D]: the weight, or 1 + weight in fp32 or wider."""
        return at_least_fp32(self.weight) + 1 if self.zero_centered else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)


def unchanged(x: Tensor) -> Tensor:
    """Identity, used where there is no norm."""
    return x


def norm_of_sum(norm: Callable[[Tensor], Tensor], x: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + added), x + added), both [..., D]; by one fused kernel if the run uses one (`kernels.norm.add_rms_norm`)."""
    if isinstance(norm, RMSNorm) and "forward" not in vars(norm) and fuses_sums(x):  # not if the norm is recomputed separately
        return add_rms_norm(x, added, norm.scale, norm.eps)
    total = x + added
    del added  # else it would stay in memory while the norm is computed
    return norm(total), total


def build_rms_norm(model: Model, size: int, eps: float | None = None) -> RMSNorm:
    """The model's RMSNorm over `size` elements. `eps` None: the model's epsilon."""
    return RMSNorm(size, model.norm_eps if eps is None else eps, zero_centered=model.zero_centered_norm)


def build_norm(model: Model) -> nn.Module:
    """The model's norm over the hidden size."""
    if model.norm == "rmsnorm":
        return build_rms_norm(model, model.hidden_size)
    return nn.LayerNorm(model.hidden_size, model.norm_eps)
