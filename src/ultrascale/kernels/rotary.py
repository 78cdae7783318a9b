"""Rotary positions (Su et al. 2021): each head's dimensions i and i + E/2 form a plane that turns by position * theta^(-2i/E).

    first  | first * cos - second * sin        Halves, not neighbours, are paired: the layout of Hugging Face weights.
    second | second * cos + first * sin

The turn is orthogonal, so its backward pass is the turn by the opposite angle: nothing but the shared cos and sin is saved.
Angles are computed in fp32 and rounded to the activations' dtype, exactly as transformers does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ultrascale.spec.model import Model, RopeScaling

Angles = tuple[Tensor, Tensor]
"""cos and sin, each [1 or B, S, 1, E/2]."""


def rotary_angles(model: Model, positions: Tensor, dtype: torch.dtype) -> Angles:
    """cos and sin of every plane at positions [S] or [B, S], each [1 or B, S, 1, E/2] in `dtype`."""
    frequencies = inverse_frequencies(model, positions.device)
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(-2)  # [..., S, 1, E/2]
    if positions.dim() == 1:
        angles = angles.unsqueeze(0)
    scale = attention_factor(model.rope_scaling)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn heads x [B, S, H, E] by `angles`, which have the dtype of x."""
    cos, sin = angles
    if torch.compiler.is_compiling():
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return _Rotate.apply(x, cos, sin)  # pyright: ignore[reportReturnType]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, sign=-1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, *, sign: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


def inverse_frequencies(model: Model, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each plane, [E/2] fp32, after scaling."""
    planes = torch.arange(0, model.head_dim, 2, dtype=torch.int64, device=device).float()
    periods = model.rope_theta ** (planes / model.head_dim)
    if model.rope_scaling is None:
        return 1.0 / periods
    if model.rope_scaling.rope_type == "llama3":
        return _llama3(1.0 / periods, model.rope_scaling)
    return _yarn(periods, model, model.rope_scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by: YaRN's temperature (Peng et al. 2023, section 3.4), otherwise 1."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    kept_share = (original / wavelengths - low) / (high - low)
    between = (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / scaling.factor, frequencies)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, stretched)


def _yarn(periods: Tensor, model: Model, scaling: RopeScaling) -> Tensor:
    """Planes below `first` are kept, above `last` stretched, those between interpolated (Peng et al. 2023, section 3.2)."""

    def plane_that_turns(rotations: float) -> float:
        length = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return model.head_dim * math.log(length) / (2 * math.log(model.rope_theta))

    first = max(math.floor(plane_that_turns(scaling.beta_fast)), 0)
    last = min(math.ceil(plane_that_turns(scaling.beta_slow)), model.head_dim - 1)
    planes = torch.arange(periods.numel(), dtype=torch.float32, device=periods.device)
    kept_share = 1 - ((planes - first) / (last - first or 0.001)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept_share) + 1.0 / periods * kept_share
