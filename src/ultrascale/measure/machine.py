"""What this machine can reach: the ceiling that MFU on a CPU is held against."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from statistics import median

import torch

from ultrascale.spec.layout import Precision

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


def device_name(device: torch.device | str) -> str:
    """The device as people call it: the GPU's name, or the CPU's model."""
    here = torch.device(device)
    if here.type == "cuda":
        return torch.cuda.get_device_name(here)
    return _cpu_model() or platform.processor() or platform.machine()


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
