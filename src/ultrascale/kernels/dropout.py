"""Dropout whose mask depends only on the token (Hinton et al. 2012; Vaswani et al. 2017, section 5.4).

Whether an element is dropped is a pure function of (seed, sequence number, position, site in the model, channel). So every
layout drops the same elements, a resumed run continues with the same masks, and recomputation repeats them. Nothing is saved
for the backward pass but the tokens' keys, which the whole model shares: the mask is recomputed, from a hash of 32-bit words
instead of a random stream. Few multiplications are enough (Wellons 2018, "Prospecting for hash functions": lowbias32).

    key of a token    64 bits, from seed, sequence and position: computed once per micro-batch (`token_keys`)
    row of a site     32 bits, from the key and the site's number
    element           the row plus the channel's word, mixed; dropped if below rate * 2^32
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.torch_private import never_compiled

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples of it are spread widely (SplitMix, Steele et al. 2014; the two multipliers too)."""
_SPLIT_1, _SPLIT_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ODD_64 = 0x2545F4914F6CDD1D
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))
"""Shifts and factors of lowbias32, as signed words. Its last shift changes only the low half, which has no effect here."""


def token_keys(numbers: NDArray[np.int64], length: int, seed: int) -> NDArray[np.int64]:
    """Key of each token, [N, length], of the sequences with these global numbers [N]."""
    places = np.arange(length, dtype=np.uint64)
    rows = _split_mix(numbers.astype(np.uint64) ^ _split_mix(np.uint64(seed % 2**64)))
    return _split_mix(rows[:, None] ^ places).view(np.int64)


def dropout(x: Tensor, rate: float, keys: Tensor, site: int) -> Tensor:
    """x [B, S, D] with a fraction `rate` (0 to 1) of its elements zero and the others divided by 1 - rate, in the dtype of x.

    `keys` [B, S] int64 (`token_keys`); `site`: number of this dropout in the model.
    """
    if torch.compiler.is_compiling():
        if is_cuda(x):  # the compiler recomputes the mask in the backward pass itself
            return (x * (1 / (1 - rate))).masked_fill(dropped(keys, site, x.shape[-1], rate), 0)
        return _uncompiled(x, rate, keys, site)
    return _Dropout.apply(x, rate, keys, site)  # pyright: ignore[reportReturnType]


def dropped(keys: Tensor, site: int, width: int, rate: float) -> Tensor:
    """Mask of the dropped elements of [B, S, width], bool."""
    row = ((keys + site) * _ODD_64).bitwise_right_shift(32).to(torch.int32)  # [B, S]
    column = torch.arange(width, device=keys.device, dtype=torch.int32) * (_GOLDEN >> 33)
    bits = row.unsqueeze(-1) + column
    scratch = torch.empty_like(bits)
    for shift, factor in _ROUNDS:
        torch.bitwise_right_shift(bits, shift, out=scratch)
        scratch.bitwise_and_(2 ** (32 - shift) - 1)  # torch's shift repeats the sign bit
        bits.bitwise_xor_(scratch).mul_(factor)
    del scratch
    return bits < round(rate * 2**32) - 2**31


def _split_mix(x: Any) -> Any:
    """SplitMix64's finaliser of uint64 numbers, modulo 2^64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_SPLIT_1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SPLIT_2)
        return x ^ (x >> np.uint64(31))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, keys: Tensor, site: int) -> Tensor:
        ctx.rate, ctx.keys, ctx.site = rate, keys, site
        return _drop(x, rate, keys, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(grads[0], ctx.rate, ctx.keys, ctx.site), None, None, None


@never_compiled
def _uncompiled(x: Tensor, rate: float, keys: Tensor, site: int) -> Tensor:
    """The C++ that torch 2.13 generates hashes wrongly: where a column's multiple overflows 32 bits, and in the columns after
    the last whole vector of elements that are not 4 bytes wide."""
    return _Dropout.apply(x, rate, keys, site)  # pyright: ignore[reportReturnType]


def _drop(x: Tensor, rate: float, keys: Tensor, site: int) -> Tensor:
    hidden = dropped(keys, site, x.shape[-1], rate)
    return (x * (1 / (1 - rate))).masked_fill_(hidden, 0)
