"""The laws behind the prices of computation: the time of a GEMM or an attention kernel on one device.

A GEMM of [m, k] by [k, n], `count` of them in one launch:

    w      = count m n / (128 x 128 x multiprocessors)             waves of output tiles, rows padded in part
    useful = w (k + ramp)                                          `ramp`: a tile's prologue and epilogue, in steps of k
    idle   = (partial_wave (ceil(w) - w) + fill) h(k)              processors without a tile; split-k shares long sums: h bends
    t_c    = (useful + idle) x tile FLOPs / (peak x efficiency)    more for very large ones: the chip's power limit
    t_m    = bytes of operands and result / (bandwidth x bandwidth_efficiency)
    t      = launch + (t_c^p + t_m^p)^(1/p) + cast                 roofline, round corner; cast: quantizing fp8 operands

Attention (flash kernels: a processor takes 128 queries of a head and walks the keys):

    mean, longest   keys a tile walks (causal: a half and all); a masked end costs `edge` keys, a tile `ramp`
    t_c    = max(longest, tiles mean / multiprocessors + tail longest) x FLOPs of a key / (peak x efficiency(head_dim))
    t      = launch + max(t_c, bytes / bandwidth)

A GEMM whose n or k is not a multiple of 16 bytes is read in narrower words, which slows t_c by `unaligned`; flash kernels are
compiled for multiples of `head_dim_step` and compute the padding of other head dims.

`tail` is the wait for the last, longest tile: with few heads per device it is most of the time, a cost of tensor parallelism.
Every term grows with every size, so a larger GEMM with no better alignment is never cheaper. Efficiencies stay below 1: no
price is below the roofline. The constants are fitted by `benchmarks/plan/fit_compute.py` (`plan/laws/computing.toml`); errors:
docs/compute-model.md. The laws take floats, or NumPy arrays with `ceil=numpy.ceil` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TILE = 128
"""Rows and columns of an output tile, and queries of an attention tile: close to the kernels of all these devices."""
FLASH_LAUNCH_SECONDS = 5e-6
"""Launch and prologue of an attention kernel. Below the resolution of the published tables; close to the GEMM tables' own 2 to
4."""
STREAM_EFFICIENCY = 0.85
"""Fraction of the memory bandwidth that a bandwidth-bound attention kernel reaches (H200: 2.1 to 4.1 TB/s of 4.8)."""
BACKWARD_WORK = 2.5
"""FLOPs of the backward pass over the forward pass: five GEMMs instead of two (FlashAttention-2, section 4.1)."""
ALIGNED_BYTES = 16
"""Bytes that a thread loads at once; Hopper's copy engine requires multiples of them: such rows run at full speed."""
HEAD_DIMS = (64.0, 128.0, 160.0, 256.0)
"""Head dims at which `AttentionCurve.efficiency` is given: mean of query and value head dim (DeepSeek: 160); log-linear
between."""


@dataclass(frozen=True, eq=False, slots=True)
class MatmulCurve:
    """Constants of one device and dtype. Compared by identity, so that caches are fast."""

    efficiency: float
    """Fraction of the peak of unboundedly large GEMMs, before the power limit."""
    launch_seconds: float
    bandwidth_efficiency: float
    ramp: float
    """Cost of a tile's prologue and epilogue, in steps of k."""
    fill: float
    """Waves lost to start and end."""
    split: float
    """Length of k from which split-k shares idle processors."""
    partial_wave: float
    """Fraction of the last wave's empty slots that is lost, 0 to 1."""
    padding: float
    """Fraction of the padding of m and n to whole tiles that is computed, 0 to 1."""
    sharpness: float
    """Exponent of the roofline's corner, at least 1 (a sum)."""
    power_flops: float
    """FLOPs at which half of the power limit's cost applies."""
    power: float
    """Fraction of time that the power limit adds to very large GEMMs."""
    cast_efficiency: float = 0.0
    """Fraction of the bandwidth at which the left operand is read in bf16 and written in fp8. 0: no cast."""
    unaligned: float = 1.0
    """Time relative to an aligned GEMM, if n or k is not a multiple of `ALIGNED_BYTES`."""
    operand_bytes: int = 2
    result_bytes: int = 2
    multiprocessors: int = 1
    peak_flops: float = 1.0
    bytes_per_second: float = math.inf


@dataclass(frozen=True, eq=False, slots=True)
class AttentionCurve:
    """Constants of one device, kernel and direction."""

    efficiency: tuple[float, float, float, float]
    """Fraction of the peak at HEAD_DIMS."""
    ramp: float
    """Cost of a tile's prologue and epilogue, in keys."""
    tail: float
    """Longest tiles that the end of the kernel waits for."""
    edge: float
    """Keys that are computed and masked at each end of a tile's row of scores."""
    head_dim_step: int = 1
    """Head dims that the kernels are compiled for are multiples of it."""
    multiprocessors: int = 1
    peak_flops: float = 1.0
    bytes_per_second: float = math.inf


def steady(value: Any) -> Any:
    """`value`, a number or an array, rounded to 41 of its 53 bits. Powers and logarithms differ in the last bit between C
    libraries, and so would a plan in a browser from the same plan here."""
    high = value * (2.0**12 + 1)
    return high - (high - value)


def alignment_work(curve: MatmulCurve, n: Any, k: Any) -> Any:
    """Factor on a GEMM's work for the lengths of its rows: 1 if they are multiples of `ALIGNED_BYTES`. Rows have length n or k
    in the forward GEMM and both gradients; m, the number of tokens, is never a row length."""
    multiple = ALIGNED_BYTES // curve.operand_bytes
    return 1 + (curve.unaligned - 1) * ((n % multiple != 0) | (k % multiple != 0))


def matmul_law(
    curve: MatmulCurve, m: Any, n: Any, k: Any, count: Any = 1, ceil: Callable[[Any], Any] = math.ceil, work: Any = 1
) -> Any:
    """Seconds of `count` GEMMs [m, k] x [k, n] in one launch; see the head of this file. `work`: `alignment_work`."""
    rows, columns = ceil(m / TILE), ceil(n / TILE)
    padded_m = m + curve.padding * (rows * TILE - m)
    padded_n = n + curve.padding * (columns * TILE - n)
    tiles = TILE * TILE * curve.multiprocessors
    waves = count * padded_m * padded_n / tiles
    shared_k = k * curve.split / (k + curve.split)
    idle = curve.partial_wave * (ceil(count * rows * columns / curve.multiprocessors) - waves) + curve.fill
    work = work * 2 * tiles * (waves * (k + curve.ramp) + idle * shared_k)
    flops = 2.0 * count * m * n * k
    compute = work / (curve.peak_flops * curve.efficiency) * (1 + curve.power * flops / (flops + curve.power_flops))
    num_bytes = count * (curve.operand_bytes * (m * k + k * n) + curve.result_bytes * m * n)
    memory = num_bytes / (curve.bytes_per_second * curve.bandwidth_efficiency)
    p = curve.sharpness
    seconds = curve.launch_seconds + steady((compute**p + memory**p) ** (1 / p))
    if curve.cast_efficiency:
        seconds = seconds + 3 * count * m * k / (curve.bytes_per_second * curve.cast_efficiency)
    return seconds


def attention_law(
    curve: AttentionCurve,
    tiles: Any,
    keys: Any,
    share: Any,
    head_dims: Any,
    num_bytes: Any,
    efficiency: Any,
    work: float,
) -> Any:
    """Seconds of one attention kernel.

    `tiles`: heads times blocks of 128 queries; `share`: fraction of the square of scores that is attended to; `head_dims`: of
    queries and values together; `num_bytes` moved at least; `work`: 1 forward, `BACKWARD_WORK` backward.
    """
    masked = (1 - share) * min(2 * curve.edge, keys)
    longest = min(keys, 2 * share * keys + masked) + curve.ramp
    mean = share * keys + masked + curve.ramp
    walked = max(longest, tiles * mean / curve.multiprocessors + curve.tail * longest)
    key_seconds = 2 * TILE * head_dims * work * curve.multiprocessors / (curve.peak_flops * efficiency)
    return FLASH_LAUNCH_SECONDS + max(walked * key_seconds, num_bytes / (curve.bytes_per_second * STREAM_EFFICIENCY))


def kernel_head_dim(curve: AttentionCurve, head_dim: float) -> float:
    """The head dim that a kernel computes with: the next one that it was compiled for."""
    return curve.head_dim_step * math.ceil(head_dim / curve.head_dim_step)


def attention_efficiency(curve: AttentionCurve, head_dim: float) -> float:
    """Fraction of the peak at a mean head dim: log-linear between HEAD_DIMS, constant outside."""
    values = curve.efficiency
    if head_dim <= HEAD_DIMS[0]:
        return values[0]
    for low in range(len(HEAD_DIMS) - 1):
        if head_dim <= HEAD_DIMS[low + 1]:
            part = math.log(head_dim / HEAD_DIMS[low]) / math.log(HEAD_DIMS[low + 1] / HEAD_DIMS[low])
            return steady(values[low] * (values[low + 1] / values[low]) ** part)
    return values[-1]
