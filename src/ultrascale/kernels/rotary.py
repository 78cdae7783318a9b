"""Rotary position embedding (RoPE; Su et al. 2021): pairs of a head's dimensions rotate by position * theta^(-2i/E).

    first  | first * cos - second * sin        Dimensions i and i + E/2 are paired, the layout of Hugging Face weights; in
    second | second * cos + first * sin        DeepSeek's files adjacent ones, 2i and 2i + 1.

A head may rotate in part: its first dimensions (Nemotron), or its last (latent attention). The rotation is orthogonal, so its
backward pass rotates by the opposite angle: nothing but the shared cos and sin is saved. Angles are computed in fp32 and
rounded to the activations' dtype, exactly as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.kernels.choice.implementation import form_of

Angles = tuple[Tensor, Tensor]
"""cos and sin, each [1 or B, S, 1, E/2]."""


def rotary_angles(model: Model, positions: Tensor, dtype: torch.dtype, *, is_local: bool = False) -> Angles:
    """cos and sin of every pair at positions [S] or [B, S], each [1 or B, S, 1, E/2] in `dtype`. `is_local`: for blocks with
    `rope_local_base_freq`."""
    if is_local:
        model = replace(model, rope_theta=model.rope_local_base_freq or model.rope_theta, rope_scaling=None)
    frequencies = inverse_frequencies(model, positions.device)
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(-2)  # [..., S, 1, E/2]
    if positions.dim() == 1:
        angles = angles.unsqueeze(0)
    scale = attention_factor(model.rope_scaling)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: Tensor, angles: Angles, *, start: int = 0, neighbours: bool = False) -> Tensor:
    """Rotate heads x [B, S, H, E] by `angles`, which have the dtype of x: dimensions from `start` on, two for each angle."""
    cos, sin = angles
    if torch.compiler.is_compiling():
        return _traced_turn(x, cos, sin, start, neighbours)
    if form_of("rotary", x) == "triton":
        from ultrascale.kernels import triton_rotary  # here: Triton need not be installed

        return triton_rotary.rotate(x, angles, start=start, neighbours=neighbours)
    return Rotate.apply(_turn, x, cos, sin, start, neighbours)  # pyright: ignore[reportReturnType]


class Rotate(torch.autograd.Function):
    """Rotation by `turn`, and back in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, turn: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, start: int, neighbours: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turn, ctx.place = turn, (start, neighbours)
        return turn(x, cos, sin, *ctx.place, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, ctx.turn(grads[0], cos, sin, *ctx.place, sign=-1), None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, start: int, neighbours: bool, *, sign: int) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    end = start + 2 * cos.shape[-1]
    for still in (slice(0, start), slice(end, x.shape[-1])):
        if still.start < still.stop:
            out[..., still] = x[..., still]
    first, second = _pairs(x[..., start:end], neighbours)
    out_first, out_second = _pairs(out[..., start:end], neighbours)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


def _traced_turn(x: Tensor, cos: Tensor, sin: Tensor, start: int, neighbours: bool) -> Tensor:
    end = start + 2 * cos.shape[-1]
    first, second = _pairs(x[..., start:end], neighbours)
    turned = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)
    return torch.cat((x[..., :start], joined, x[..., end:]), dim=-1) if end - start < x.shape[-1] else joined


def _pairs(x: Tensor, neighbours: bool) -> tuple[Tensor, ...]:
    """First and second dimension of every pair, as views."""
    return (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)


def inverse_frequencies(model: Model, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each pair, [E/2] fp32, after scaling."""
    planes = torch.arange(0, model.rotary_dim, 2, dtype=torch.int64, device=device).float()
    periods = model.rope_theta ** (planes / model.rotary_dim)
    if model.rope_scaling is None:
        return 1.0 / periods
    if model.rope_scaling.rope_type == "linear":
        return 1.0 / periods / model.rope_scaling.factor
    if model.rope_scaling.rope_type == "llama3":
        return _llama3(1.0 / periods, model.rope_scaling)
    return _yarn(periods, model, model.rope_scaling)


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor of cos and sin: YaRN's temperature (Peng et al. 2023, section 3.4), otherwise 1."""
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def score_factor(scaling: RopeScaling | None) -> float:
    """Factor of scores besides 1/sqrt(E): the square of DeepSeek's temperature for all dimensions, otherwise 1."""
    if scaling is None or scaling.mscale_all_dim is None:
        return 1.0
    return _temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def _temperature(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


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
    """Pairs below `first` are kept, above `last` stretched, those between interpolated (Peng et al. 2023, section 3.2)."""

    def plane_that_turns(rotations: float) -> float:
        length = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return model.rotary_dim * math.log(length) / (2 * math.log(model.rope_theta))

    first, last = plane_that_turns(scaling.beta_fast), plane_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.rotary_dim - 1)
    planes = torch.arange(periods.numel(), dtype=torch.float32, device=periods.device)
    kept_share = 1 - ((planes - first) / (last - first or 0.001)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept_share) + 1.0 / periods * kept_share
