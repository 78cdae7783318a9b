"""What this machine can reach: the ceiling that MFU on a CPU is held against."""

from __future__ import annotations

import platform
import re
import time
from dataclasses import dataclass
from statistics import median

import torch

from ultrascale.spec.cluster import Accelerator, parse_cluster
from ultrascale.spec.layout import Precision
from ultrascale.spec.machines import ACCELERATORS

TORCH_DTYPE: dict[Precision, torch.dtype] = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MatmulCeiling:
    """The best rate of a large matrix product on one device, with the threads this process has now."""

    flops_per_second: float
    spread: float
    """(slowest - fastest) / median of the timed repetitions."""
    device: str
    dtype: Precision
    size: int
    """The product is size x size x size."""
    threads: int


def measure_matmul_ceiling(
    precision: Precision, device: torch.device | str = "cpu", *, budget_seconds: float = 0.2
) -> MatmulCeiling:
    """Time square products in the dtype of `precision` for about `budget_seconds`, of the size that fills the device.

    The fastest repetition counts: on a shared machine everything else is somebody else's work.
    """
    here = torch.device(device)
    size = 8192 if here.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=here).to(TORCH_DTYPE[precision]) for _ in range(2))
    _time_product(left, right)  # warms caches, clocks and the library's choice of kernel
    seconds = [_time_product(left, right)]
    while sum(seconds) < budget_seconds:
        seconds.append(_time_product(left, right))
    spread = (max(seconds) - min(seconds)) / median(seconds)
    return MatmulCeiling(2 * size**3 / min(seconds), spread, device_name(here), precision, size, torch.get_num_threads())


@dataclass(frozen=True)
class Peak:
    """The rate that MFU and HFU are shares of."""

    flops_per_second: float
    """Of one rank's device."""
    origin: str
    """Where the number comes from, in words."""


def peak_flops(cluster: str, precision: Precision, device: torch.device) -> Peak:
    """The dense peak of the devices of `cluster`; for `auto`, of this device, catalogued or measured.

    A CPU has no datasheet peak that its cores, clocks and libraries keep: its ceiling is a large matrix product, timed now.
    Raises SpecError if `cluster` is not in the catalogue.
    """
    accelerator = this_gpu(device) if cluster == "auto" else parse_cluster(cluster).accelerator
    if accelerator is not None and not accelerator.measured_at_run_time:
        return Peak(accelerator.peak_flops_per_second(precision), f"the {precision} peak of {accelerator.title}")
    ceiling = measure_matmul_ceiling(precision, device)
    return Peak(ceiling.flops_per_second, f"a large {precision} matrix product here, {ceiling.threads} threads")


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
    here = torch.device(device)
    if here.type == "cuda":
        return torch.cuda.get_device_name(here)
    return _cpu_model() or platform.processor() or platform.machine()


def this_gpu(device: torch.device) -> Accelerator | None:
    """The catalogue's entry for `device`; None for a CPU, or a GPU it does not have."""
    if device.type != "cuda":
        return None
    return catalogued(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    except OSError:  # not Linux
        return None


def _time_product(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    start = time.perf_counter()
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start
