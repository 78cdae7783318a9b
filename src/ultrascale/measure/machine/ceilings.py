"""Measured peak FLOPs of this machine: the rate by which MFU divides on a CPU."""

from __future__ import annotations

import json
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from ultrascale.catalogue.cluster import Accelerator, parse_cluster
from ultrascale.catalogue.machines import ACCELERATORS
from ultrascale.description.layout import Precision
from ultrascale.description.units import count_of
from ultrascale.measure.machine.doctor import cpu_facts
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE

PEAK_FILE = ".peak.json"
"""File in a run's folder with the highest ceiling that its starts have measured."""
MIN_PRODUCTS = 10
FEW_THREADS = 2
"""Number of threads that a GEMM of size 512 keeps busy: it reaches the rate of 1024 (measured with one and two threads)."""


@dataclass(frozen=True)
class MatmulCeiling:
    """Highest rate of a large GEMM on one device, with this process's current number of threads."""

    flops_per_second: float
    spread: float
    """(slowest - fastest) / median of the timed repetitions."""
    device: str
    dtype: Precision
    size: int
    """The GEMM is size x size x size."""
    threads: int


def measure_matmul_ceiling(
    precision: Precision, device: torch.device | str = "cpu", *, budget_seconds: float | None = None
) -> MatmulCeiling:
    """Time square GEMMs in the dtype of `precision` for about `budget_seconds`, of a size that fills the device.
    Default: 0.5 on a GPU, whose clocks need time to rise, else 0.1.

    The fastest repetition counts: on a shared machine others are slowed by other work. Spends up to four times the budget to
    reach `MIN_PRODUCTS` repetitions.
    """
    on_device = torch.device(device)
    budget = budget_seconds or (0.5 if on_device.type == "cuda" else 0.1)
    size = 8192 if on_device.type == "cuda" else 512 if torch.get_num_threads() <= FEW_THREADS else 1024
    left, right = (torch.randn(size, size, device=on_device).to(TORCH_DTYPE[precision]) for _ in range(2))
    _time_product(left, right)  # warms caches, clocks and the library's choice of kernel
    seconds = [_time_product(left, right)]
    while sum(seconds) < budget * (1 if len(seconds) >= MIN_PRODUCTS else 4):
        seconds.append(_time_product(left, right))
    spread = (max(seconds) - min(seconds)) / median(seconds)
    return MatmulCeiling(2 * size**3 / min(seconds), spread, device_name(on_device), precision, size, torch.get_num_threads())


@dataclass(frozen=True)
class Peak:
    """Peak rate by which MFU and HFU divide."""

    flops_per_second: float
    """FLOP/s of one rank's device."""
    origin: str
    """Source of the number, in words."""
    ceiling: MatmulCeiling | None = None
    """Measurement of the rate, stored by the run; None for a datasheet's number."""


def stored_or_measured_peak(file: Path, cluster: str, precision: Precision, device: torch.device) -> Peak:
    """`peak_flops`, or the ceiling that an earlier start of the run stored in `file` if that is higher.

    A short measurement on a busy machine can only be too low, so the highest of all starts is the most accurate. Ceilings of
    another device, dtype or number of threads, and unreadable files, are ignored.
    """
    peak = peak_flops(cluster, precision, device)
    stored, now = _stored_ceiling(file), peak.ceiling
    if now is None or stored is None or _measured_on(stored) != _measured_on(now):
        return peak
    if stored.flops_per_second <= now.flops_per_second:
        return peak
    return Peak(stored.flops_per_second, f"{peak.origin}, the best of this run's starts", stored)


def peak_flops(cluster: str, precision: Precision, device: torch.device) -> Peak:
    """Dense peak FLOPs per second of `device`: that of `cluster` (for which the run is planned) if the device is one of its
    own.

    Otherwise, and for `auto`, the device's own peak, from the catalogue or measured; `origin` says which. A CPU has no reliable
    datasheet peak: its ceiling is a large GEMM, timed now. Raises SpecError if `cluster` is not in the catalogue.
    """
    gpu, planned = this_gpu(device), None if cluster == "auto" else parse_cluster(cluster).accelerator
    elsewhere = not is_here(cluster, device)
    accelerator = gpu if planned is None or elsewhere else planned
    note = f" (cluster = {cluster} is another machine)" if elsewhere else ""
    if accelerator is not None and not accelerator.measured_at_run_time:
        known = precision if precision in accelerator.peak_flops else {"fp16": "bf16", "fp8": "bf16"}.get(precision, precision)
        return Peak(accelerator.peak_flops_per_second(known), f"the {known} peak of {accelerator.title}{note}")
    measured = "bf16" if precision == "fp8" else precision  # where fp8 has no peak of its own its products are in wider formats
    ceiling = measure_matmul_ceiling(measured, device)
    origin = f"a large {measured} matrix product here, {count_of(ceiling.threads, 'thread')}{note}"
    return Peak(ceiling.flops_per_second, origin, ceiling)


def catalogued(name: str, memory_bytes: int) -> Accelerator | None:
    """The catalogue's entry for a GPU that calls itself `name` (`NVIDIA H100 80GB HBM3`); None if it has none."""

    def is_meant(accelerator: Accelerator) -> bool:
        chip = accelerator.name.partition("-")[0]
        same_slot = ("pcie" in accelerator.name) == ("pcie" in name.lower())
        return same_slot and re.search(rf"\b{chip}\b", name, re.IGNORECASE) is not None

    alike = [accelerator for accelerator in ACCELERATORS.values() if is_meant(accelerator)]
    return min(alike, key=lambda accelerator: abs(accelerator.memory_bytes.value - memory_bytes), default=None)


def device_name(device: torch.device | str) -> str:
    """The device as people call it: the GPU's name, or the CPU's model."""
    on_device = torch.device(device)
    if on_device.type == "cuda":
        return torch.cuda.get_device_name(on_device)
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def this_gpu(device: torch.device) -> Accelerator | None:
    """The catalogue's entry for `device`; None for a CPU, or a GPU it does not have."""
    if device.type != "cuda":
        return None
    return catalogued(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def is_here(cluster: str, device: torch.device) -> bool:
    """True if `device` may belong to the machines called `cluster`; always for `auto`. Raises SpecError for unknown names."""
    return cluster == "auto" or _may_be(parse_cluster(cluster).accelerator, this_gpu(device), device)


def _may_be(planned: Accelerator, gpu: Accelerator | None, device: torch.device) -> bool:
    """True if `device` (catalogued as `gpu`) may be the planned accelerator; between variants of a chip, the user decides."""
    if (planned.name == "cpu") != (device.type == "cpu"):
        return False
    return gpu is None or gpu.name.partition("-")[0] == planned.kind.partition("-")[0]


def _measured_on(ceiling: MatmulCeiling) -> tuple[str, str, int]:
    return ceiling.device, ceiling.dtype, ceiling.threads


def _stored_ceiling(file: Path) -> MatmulCeiling | None:
    try:
        return MatmulCeiling(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # not there yet, cut short, or of another version
        return None


def _time_product(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    start = time.perf_counter()
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start
