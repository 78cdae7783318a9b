"""Fitted curve of each device, scaled by the device's own peaks, bandwidth and processors.

Five devices have measured tables of GEMMs, three families have tables of attention. Every other device uses the law of a
relative (`law` in the catalogue) with its own peaks, memory bandwidth and number of processors, and the relative's fractions of
them. If `Accelerator.matmul_fraction` differs from the relative's, efficiencies are scaled by that ratio (MI300X: 0.49 of its
peak, where its relative reaches more); the same chip at another power limit is slowed by that.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ultrascale.catalogue.cluster import Accelerator
from ultrascale.catalogue.machines import ACCELERATORS
from ultrascale.catalogue.tables import read_tables
from ultrascale.description.problems import mistake
from ultrascale.plan.laws.by_identity import cached_by_identity
from ultrascale.plan.laws.curves import AttentionCurve, MatmulCurve

FITS = read_tables("computing.toml", Path(__file__).parent)
MATMUL = {(name, dtype): MatmulCurve(**fit) for name, fits in FITS["products"].items() for dtype, fit in fits.items()}
"""Fitted constants by device and dtype."""
ATTENTION = {
    (family, kernel, direction): AttentionCurve(**{**fit, "efficiency": tuple(fit["efficiency"])})
    for family, kernels in FITS["attention"].items()
    for kernel, directions in kernels.items()
    for direction, fit in directions.items()
}
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "nvfp4": 0.5}
FAMILIES = {"a100-80": "a100", "h100-sxm": "hopper", "h200": "hopper", "b200": "blackwell", "gb200": "blackwell"}
FP8_ATTENTION = {"a100": (1.0, 1.0), "hopper": (1.5, 1.0), "blackwell": (1.4, 1.4)}
"""Speed of fp8 attention over bf16, forward and backward. cudnn-frontend's benchmark 2026-09, 4k to 32k, medians: H200 forward
1.5, backward slower than bf16 (taken as 1: it would not be used); GB200 1.36 and 1.33 at head dim 128, 1.5 and 1.7 at 192."""
UNALIGNED = 1.4
"""Time of a GEMM whose rows are not multiples of 16 bytes, over an aligned one's. RTX 4090: 156 TFLOP/s aligned, 107 to 116
with odd sizes (pytorch issue 181718, 2026). A100: 132 with k = 128, 86 with 140, of which tiles of k are 1.14 (issue 83272,
2022). H100: 509 with k = 2501 where its law has some 690 (float8_experimental pull request 145, 2024). Without cuBLAS 11 tensor
cores would not be used at all (NVIDIA, Matrix Multiplication Background, 2.2). CPUs' vector loads need no alignment."""
NVFP4_OVER_FP8 = 0.6
"""Time of GEMMs in NVFP4 over FP8 where its peak is twice FP8's, from Megatron-Bridge's tables with both for one layout (GB200;
2026). With the root of the peaks' ratio: 0.49 on Blackwell Ultra, where it is three times, and Llama 3 70B gains 1.50 of MXFP8
where GB200 gains 1.31 in one layout. MXFP8 equals FP8, whose tensor cores it uses."""
HEAD_DIM_STEP = 32
"""Multiple to which flash kernels round head dims (FlashAttention-2: `head_size_rounded` in its flash_api.cpp)."""
POWER_EXPONENT = 0.75
"""Exponent of the ratio by which a chip has less power per peak FLOP than the chip whose law was measured. 1 where voltage is
at its minimum and clocks follow power, 1/3 where voltage falls with the clock."""
MEASURED_EFFICIENCY = 0.95
"""Efficiency on a device whose peak is itself a measured GEMM, such as the CPU: other shapes come close to it."""
CPU_LAUNCH_SECONDS = 2e-5
"""PyTorch's dispatch and thread wake-up for a small operation on a CPU; assumed."""


class ElementWise(NamedTuple):
    """Element-wise operations on one device."""

    launch_seconds: float
    bytes_per_second: float
    """Rate of large copies."""
    columns_bytes_per_second: float
    """Rate of kernels that read and write a matrix across its rows."""


COLUMNS_BYTES_PER_SECOND = 0.68e12 / 132
"""Bytes per second of a multiprocessor in kernels that torch's compiler generates to scale and cast a matrix by its columns:
0.6 to 0.7 TB/s on an H100 where along the rows it is 2.0 to 2.2 (pytorch issue 149982, 2025). Loads and stores of single
elements limit them, so that more bandwidth does not help. Validated against the extra time of torchtitan's Llama 3 8B on 8 GPUs
with scales per row instead of per tensor: 14 percent on H100, 21 on B200 (torchao's READMEs of float8 and mx_formats, 2025)."""
STREAM_EFFICIENCY = {"a100-80": 0.86, "h100-sxm": 0.90, "h200": 0.90, "b200": 0.85, "gb200": 0.85}
"""Fraction of the memory bandwidth that large element-wise kernels reach. A100: BabelStream, 1.75 of 2.04 TB/s (2021). H100 and
H200: device copies, 3.0 of 3.35 and 4.3 of 4.8 TB/s (2026-11). Blackwell: assumed between these and SimuMax's 0.67 of 8 TB/s
(2026), which includes its host's overheads."""


def relative_of(accelerator: Accelerator) -> str:
    """Fitted device whose law `accelerator` uses: itself, or a named relative; a CPU's shares are replaced."""
    return accelerator.law or (accelerator.kind if accelerator.kind in FAMILIES else "a100-80")


def power_slowdown(accelerator: Accelerator) -> float:
    """Factor by which the power limit slows GEMMs and attention of a device with the chip of its relative, by their peak FLOPs
    per joule; 1 for other chips. More power than the relative's can at most undo the slowdown in the relative's law."""
    relative = ACCELERATORS[relative_of(accelerator)]
    if not accelerator.same_chip or not accelerator.watts or not relative.watts:
        return 1.0
    ratio = _peak(accelerator, "bf16") / _peak(relative, "bf16") * relative.watts.value / accelerator.watts.value
    return max(ratio**POWER_EXPONENT, 1 / (1 + MATMUL[relative.name, "bf16"].power))


@cached_by_identity
def matmul_curve(accelerator: Accelerator, dtype: str, casts: bool) -> MatmulCurve:
    """Law of GEMMs of `dtype` (`bf16 fp16 fp32 tf32 fp64 fp8 mxfp8 nvfp4`) on a device; `casts`: with the cast of the left
    operand, in fp8.

    Raises SpecError if the device's peak is unknown: not in the catalogue, or measured at run time and not filled in yet.
    """
    if dtype not in DTYPE_BYTES:
        raise mistake("dtype", f"there is no price for {dtype!r}", f"Choose {', '.join(DTYPE_BYTES)}.")
    relative = relative_of(accelerator)
    # The A100 has no fp8: a device with its law that supports fp8 uses Hopper's cast.
    fitted = "fp8" if dtype in ("mxfp8", "nvfp4") else dtype
    law = MATMUL.get((relative, fitted)) or MATMUL[("h100-sxm", "fp8") if fitted == "fp8" else (relative, "bf16")]
    peak = _peak(accelerator, dtype)
    if dtype == "nvfp4":  # the measured quantity is time relative to fp8's, whatever the peaks
        fp8 = _peak(accelerator, "fp8")
        law = replace(law, efficiency=law.efficiency * fp8 / (NVFP4_OVER_FP8 * math.sqrt(2 * fp8 / peak) * peak))
    is_cpu, slowdown = accelerator.name == "cpu", power_slowdown(accelerator)
    return replace(
        law,
        efficiency=MEASURED_EFFICIENCY if is_cpu else min(1.0, law.efficiency * _scale(accelerator, relative)) / slowdown,
        launch_seconds=CPU_LAUNCH_SECONDS if is_cpu else law.launch_seconds,
        fill=0.0 if is_cpu else law.fill,
        partial_wave=0.0 if is_cpu else law.partial_wave,
        cast_efficiency=law.cast_efficiency if casts else 0.0,
        unaligned=1.0 if is_cpu else UNALIGNED,
        operand_bytes=DTYPE_BYTES[dtype],
        result_bytes=max(2, DTYPE_BYTES[dtype]),
        multiprocessors=_multiprocessors(accelerator, relative),
        peak_flops=peak,
        bytes_per_second=_bandwidth(accelerator),
    )


HOPPER_PEAK = 989.4e12
"""Dense bf16 FLOP/s of the H100 SXM on which FlashAttention 2 was measured."""


@cached_by_identity
def attention_curve(accelerator: Accelerator, dtype: str, kernel: str, direction: str) -> AttentionCurve:
    """Law of attention kernels on a device.

    `kernel`: `flash`, the best available; `cudnn`; `flash-2`. `direction`: `forward`, `backward`. A family without measurements
    of a kernel uses those of its best one.
    """
    relative = relative_of(accelerator)
    family = FAMILIES[relative]
    fp8 = dtype == "fp8"
    peak = _peak(accelerator, "bf16" if fp8 else dtype)
    if family == "blackwell" and kernel == "flash-2":
        # Written for Ampere's tensor-core instructions, which newer devices only keep for compatibility: no faster than on
        # Hopper (B200: tritonbench's pull request 171 and flash-attention's issue 1589, 2025).
        law = ATTENTION["hopper", kernel, direction]
        law = replace(law, efficiency=tuple(share * min(1.0, HOPPER_PEAK / peak) for share in law.efficiency))
    else:
        law = (
            ATTENTION.get((family, kernel, direction))
            or ATTENTION[family, "flash-2" if family == "a100" else "flash", direction]
        )
    scale = _scale(accelerator, relative) * (FP8_ATTENTION[family][direction == "backward"] if fp8 else 1.0)
    most = 2.0 if fp8 else 1.0  # of the bf16 peak
    shares = tuple(min(most, share * scale) / power_slowdown(accelerator) for share in law.efficiency)
    return replace(
        law,
        head_dim_step=1 if accelerator.name == "cpu" else HEAD_DIM_STEP,
        efficiency=shares,  # pyright: ignore[reportArgumentType]
        multiprocessors=_multiprocessors(accelerator, relative),
        peak_flops=peak,
        bytes_per_second=_bandwidth(accelerator),
    )


@cached_by_identity
def stream(accelerator: Accelerator) -> ElementWise:
    """Law of element-wise operations on a device: launch seconds and bytes per second."""
    if accelerator.name == "cpu":
        return ElementWise(CPU_LAUNCH_SECONDS, _bandwidth(accelerator), _bandwidth(accelerator))
    relative = relative_of(accelerator)
    rate = _bandwidth(accelerator) * STREAM_EFFICIENCY[relative]
    across = min(rate, COLUMNS_BYTES_PER_SECOND * _multiprocessors(accelerator, relative))
    # An empty kernel takes about as long as the smallest GEMM.
    return ElementWise(MATMUL[relative, "bf16"].launch_seconds, rate, across)


def _peak(accelerator: Accelerator, dtype: str) -> float:
    """Peak of `dtype` in FLOPs per second; fp16 and bf16 share tensor cores, and a device without either computes at its fp32
    rate."""
    for name in {"bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "bf16"), "tf32": ("tf32", "fp32")}.get(dtype, (dtype,)):
        if name in accelerator.peak_flops:
            return accelerator.peak_flops[name].value
    return accelerator.peak_flops_per_second(dtype)


def _bandwidth(accelerator: Accelerator) -> float:
    """Memory bandwidth in bytes per second; infinite if unknown, so that it limits nothing."""
    known = accelerator.memory_bytes_per_second
    return known.value if known else math.inf


def _multiprocessors(accelerator: Accelerator, relative: str) -> int:
    if accelerator.name == "cpu":
        return accelerator.cores or 1
    return accelerator.multiprocessors or ACCELERATORS[relative].multiprocessors


def _scale(accelerator: Accelerator, relative: str) -> float:
    """Efficiency relative to the relative device's."""
    fraction, relative_fraction = accelerator.matmul_fraction, ACCELERATORS[relative].matmul_fraction
    if accelerator.name == relative or fraction is None or relative_fraction is None:
        return 1.0
    return fraction.value / relative_fraction.value
