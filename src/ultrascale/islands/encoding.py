"""Deltas of weights as bytes: unquantized, in bf16, or in 8 or 4 bits with a scale for every 128 elements.

    int8, int4    round(x / s) with s = largest |x| of the 128 / 127, or / 7; two int4 values per byte. Scales first, in fp32

A number rounds to the nearest representable value, and the sender keeps the rounding error: it is added to its next message
(error feedback, Seide et al. 2014), so that nothing is lost permanently. Without it, deltas smaller than half a quantization
step would never be sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ultrascale.description.sections.islands import SCALE_BYTES, SCALED_TOGETHER, Wire

LEVELS = {"int8": 127, "int4": 7}


def encode(values: Tensor, wire: Wire) -> Tensor:
    """`values`, [R, n] in fp32 or fp64, as bytes, uint8 [R, bytes of n]. In int8 and int4 n is a multiple of 128."""
    if wire == "fp32":
        return values.contiguous().view(torch.uint8)
    if wire == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = values.to(torch.float32).view(len(values), -1, SCALED_TOGETHER)  # [R, n / 128, 128]
    scales = blocks.abs().amax(-1, keepdim=True) / LEVELS[wire]
    steps = (blocks / scales.masked_fill(scales == 0, 1)).round().to(torch.int8).view(len(values), -1)
    if wire == "int4":
        pairs = (steps + 8).view(torch.uint8)
        steps = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
    return torch.cat([scales.view(len(values), -1).view(torch.uint8), steps.contiguous().view(torch.uint8)], dim=1)


def decode(message: Tensor, wire: Wire, dtype: torch.dtype) -> Tensor:
    """Values of the bytes of `encode`, [R, n] in `dtype`."""
    if wire == "fp32":
        return message.contiguous().view(dtype)
    if wire == "bf16":
        return message.contiguous().view(torch.bfloat16).to(dtype)
    block_bytes = SCALE_BYTES + (SCALED_TOGETHER if wire == "int8" else SCALED_TOGETHER // 2)
    blocks = message.shape[1] // block_bytes
    scales = message[:, : blocks * SCALE_BYTES].contiguous().view(torch.float32)
    steps = message[:, blocks * SCALE_BYTES :].contiguous()
    if wire == "int4":
        steps = torch.stack([steps & 15, steps >> 4], dim=-1).view(torch.int8).flatten(1) - 8
    values = steps.view(torch.int8).view(len(message), blocks, SCALED_TOGETHER).to(torch.float32) * scales[..., None]
    return values.flatten(1).to(dtype)
