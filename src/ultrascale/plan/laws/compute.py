"""Time of computation on a device: seconds of GEMMs, attention and element-wise kernels.

The laws are in `plan.laws.curves`, their constants fitted to measurements (`plan/laws/computing.toml`), errors in
docs/compute-model.md. They are times of kernels alone in a hot loop; training is slower (cold caches, shared power): callers
multiply, or pass `derate`. Plain floats; a cached price costs 0.3 microseconds, a new one 2 to 3.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

from ultrascale.catalogue.cluster import Accelerator
from ultrascale.plan.laws.curves import (
    BACKWARD_WORK,
    TILE,
    AttentionCurve,
    MatmulCurve,
    alignment_work,
    attention_efficiency,
    attention_law,
    kernel_head_dim,
    matmul_law,
)
from ultrascale.plan.laws.devices import DTYPE_BYTES, attention_curve, matmul_curve, stream

Kind = Literal["forward", "input-gradient", "weight-gradient"]
Kernel = Literal["flash", "cudnn", "flash-2"]
EXPOSED_OUTPUT = 0.6
"""Fraction of the time of writing wide gradients that does not overlap with the GEMM that computes them: between A100's and
B200's in SimuMax's measurements of GEMMs that accumulate into fp32 gradients (0.5 and 0.75; benchmarks/plan/fit_compute.py
prints the residuals)."""


def matmul_seconds(
    accelerator: Accelerator,
    m: float,
    n: float,
    k: float,
    *,
    dtype: str = "bf16",
    count: float = 1,
    kind: Kind = "forward",
    output_bytes: float = 2.0,
    derate: float = 1.0,
    casts: bool = True,
) -> float:
    """Seconds of the GEMM [m, k] x [k, n], or of one of its two gradients; m, n, k are always those of the forward GEMM.

    `count`: number of equal GEMMs in one grouped launch (experts). `dtype`: `bf16 fp16 fp32 tf32 fp64`, and `fp8 mxfp8 nvfp4`,
    with the cast of the left operand unless `casts` is false: then it is a kernel that several GEMMs share, and the caller
    prices it. `output_bytes`: memory traffic per element of a weight gradient, 2: written in bf16, 8: accumulated into an fp32
    sum. `derate` multiplies the time. Raises SpecError if the device's peak is unknown.
    """
    return derate * direction_seconds(matmul_curve(accelerator, dtype, casts), m, n, k, count, kind, output_bytes)


def attention_seconds(
    accelerator: Accelerator,
    *,
    batch: int,
    heads: float,
    key_value_heads: float,
    head_dim: int,
    queries: int,
    keys: int,
    value_head_dim: int | None = None,
    share: float = 1.0,
    dtype: str = "bf16",
    backward: bool = False,
    kernel: Kernel = "flash",
    derate: float = 1.0,
) -> float:
    """Seconds of one fused attention on one rank, over all its heads.

    `share`: fraction of the square of queries and keys that is attended to (causal: a half). `kernel`: `flash`, the best for
    the device (FlashAttention-2 on Ampere, 3 on Hopper, 4 or cuDNN on Blackwell), `cudnn`, or `flash-2` also on Hopper, as
    PyTorch's own is. Raises SpecError if the device's peak is unknown.
    """
    curve = attention_curve(accelerator, dtype, kernel, "backward" if backward else "forward")
    item = DTYPE_BYTES[dtype]
    value_dim = value_head_dim or head_dim
    seconds = flash_seconds(curve, batch, heads, key_value_heads, head_dim, value_dim, queries, keys, share, item, backward)
    return derate * seconds


def elementwise_seconds(accelerator: Accelerator, num_bytes: Any, *, num_kernels: int = 1) -> Any:
    """Seconds of `num_kernels` kernels that together read and write `num_bytes`: a minimum for each, then the memory bandwidth.
    Multi-tensor kernels of an optimizer run as fast as copies.

    `num_bytes`: a number, or an array of them. Raises SpecError if the device's peak is unknown.
    """
    rate = stream(accelerator)
    return num_kernels * rate.launch_seconds + num_bytes / rate.bytes_per_second


def columns_seconds(accelerator: Accelerator, num_bytes: float) -> float:
    """Seconds of a compiled kernel that reads and writes `num_bytes` of a matrix across its rows, as scaling and casting its
    columns does. Raises SpecError if the device's peak is unknown."""
    rate = stream(accelerator)
    return rate.launch_seconds + num_bytes / rate.columns_bytes_per_second


@lru_cache(maxsize=1 << 17)
def direction_seconds(curve: MatmulCurve, m: float, n: float, k: float, count: float, kind: Kind, output_bytes: float) -> float:
    """Seconds of a GEMM or of one of its gradients under one curve."""
    if min(m, n, k, count) <= 0:
        return 0.0
    work = alignment_work(curve, n, k)
    if kind == "forward":
        return matmul_law(curve, m, n, k, count, work=work)
    if kind == "input-gradient":
        return matmul_law(curve, m, k, n, count, work=work)
    wide = max(0.0, output_bytes - curve.result_bytes) * count * n * k
    return matmul_law(curve, n, k, m, count, work=work) + EXPOSED_OUTPUT * wide / curve.bytes_per_second


@lru_cache(maxsize=1 << 16)
def flash_seconds(
    curve: AttentionCurve,
    batch: float,
    heads: float,
    key_value_heads: float,
    head_dim: float,
    value_head_dim: float,
    queries: float,
    keys: float,
    share: float,
    itemsize: int,
    backward: bool,
) -> float:
    """Seconds of one attention kernel under one curve."""
    if min(batch, heads, queries, keys, share) <= 0:
        return 0.0
    dims = head_dim + value_head_dim
    computed = kernel_head_dim(curve, head_dim) + kernel_head_dim(curve, value_head_dim)
    work = BACKWARD_WORK if backward else 1.0
    num_bytes = work * itemsize * batch * dims * (queries * heads + keys * key_value_heads)
    tiles = batch * heads * math.ceil(queries / TILE)
    efficiency = attention_efficiency(curve, computed / 2)
    return attention_law(curve, tiles, keys, share, computed, num_bytes, efficiency, work)
