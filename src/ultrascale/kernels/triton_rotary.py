"""RoPE in Triton: one program rotates all heads of a token, and reads the token's cos and sin once.

Memory accesses per element: 2, forward and backward, plus cos and sin; 6 as separate torch kernels. The rotation is orthogonal:
its backward pass rotates by the opposite angle, and only cos and sin are saved. Computes in fp32.
"""

# What `triton.jit` makes of a function has no types, and triton need not be installed.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ultrascale.kernels.rotary import Angles, Rotate
from ultrascale.kernels.triton_launch import warps_for


def rotate(x: Tensor, angles: Angles, *, start: int = 0, neighbours: bool = False) -> Tensor:
    """Triton form of `kernels.rotary.rotate`: rotates heads x [B, S, H, E] by `angles`, [1 or B, S, 1, planes] each; 16 bits or
    fp32."""
    return Rotate.apply(_turned, x, *angles, start, neighbours)  # pyright: ignore[reportReturnType]


def _turned(x: Tensor, cos: Tensor, sin: Tensor, start: int, neighbours: bool, *, sign: int) -> Tensor:
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out, (batch, length, heads, width), planes = torch.empty_like(x), x.shape, cos.shape[-1]
    if x.numel():
        _turn[(batch * length,)](
            x, cos, sin, out, cos.numel() // planes, heads, width, planes, start, float(sign), NEIGHBOURS=neighbours,
            HEADS=(block := triton.next_power_of_2(heads)), PLANES=(turning := triton.next_power_of_2(planes)),
            WIDTH=triton.next_power_of_2(width), STILL=width > 2 * planes, num_warps=warps_for(block * turning),
        )  # fmt: skip
    return out


@triton.jit
def _turn(
    x, cos, sin, out, positions, heads, width, planes, start, sign, NEIGHBOURS: tl.constexpr, HEADS: tl.constexpr,
    PLANES: tl.constexpr, WIDTH: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    plane = tl.arange(0, PLANES)
    angle = (token % positions) * planes + plane
    c = tl.load(cos + angle, mask=plane < planes, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=plane < planes, other=0.0).to(tl.float32)[None, :] * sign
    head = tl.arange(0, HEADS)[:, None]
    row = (token * heads + head) * width
    if NEIGHBOURS:
        first = row + start + 2 * plane[None, :]
        second = first + 1
    else:
        first = row + start + plane[None, :]
        second = first + planes
    inside = (head < heads) & (plane < planes)[None, :]
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + second, (b * c + a * s).to(out.dtype.element_ty), mask=inside)
    if STILL:
        column = tl.arange(0, WIDTH)
        is_still = (column < start) | ((column >= start + 2 * planes) & (column < width))
        kept = (head < heads) & is_still[None, :]
        tl.store(out + row + column[None, :], tl.load(x + row + column[None, :], mask=kept, other=0.0), mask=kept)
