"""All lessons of the primer, run on this machine's GPU, or on the CPU in Triton's interpreter (`primer.interpreter`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from ultrascale.measure.machine.ceilings import device_name, measure_matmul_ceiling, this_gpu
from ultrascale.primer.exercise import Exercise, VariantOutcome, outcome

LESSONS = ("access", "tiles", "coarsening", "divergence", "softmax", "attention")
"""Modules of this package, in the order of the lessons."""
COPIED = 2**30
"""Bytes of the copy that measures the memory bandwidth."""


@dataclass(frozen=True)
class Place:
    """The device of the lessons, and its ceilings. Peaks are per second, from the datasheet if the device is in the
    catalogue."""

    device: torch.device
    name: str
    peak_bytes: float | None
    peak_flops: float | None
    origin: str
    """Source of the peaks."""
    copy_bytes: float | None = None
    """Rate of a copy by torch, in bytes read and written per second."""
    product_flops: float | None = None
    """Rate of a large bf16 GEMM by torch, in FLOPs per second."""


def place(device: torch.device) -> Place:
    """Ceilings of `device`."""
    if device.type != "cuda":
        return Place(device, device_name(device), None, None, "")
    gpu, rate = this_gpu(device), _copy_rate(device)
    product = measure_matmul_ceiling("bf16", device).flops_per_second
    if gpu is None:
        return Place(device, device_name(device), rate, product, "what torch's copy and product reach here", rate, product)
    memory, peak = gpu.memory_bytes_per_second, gpu.peak_flops_per_second("bf16")
    return Place(device, gpu.title, rate if memory is None else memory.value, peak, "the datasheet's", rate, product)


def lessons(device: torch.device, only: tuple[str, ...] = ()) -> Iterator[Exercise]:
    """The exercises, each created when it is needed: their tensors are large."""
    for name in LESSONS:
        if not only or name in only:
            yield import_module(f"ultrascale.primer.exercises.{name}").exercise(device)


def outcomes(exercise: Exercise, where: Place) -> list[VariantOutcome]:
    """Every variant of an exercise, checked and, on a GPU, timed. Kernels in fp32 are compared with the same peak bandwidth."""
    flops = None if exercise.name == "divergence" else where.peak_flops  # its FLOPs do not run on tensor cores
    return [
        outcome(variant, device=where.device, peak_bytes=where.peak_bytes, peak_flops=flops) for variant in exercise.variants
    ]


def _copy_rate(device: torch.device) -> float:
    from ultrascale.primer.exercise import timed

    source = torch.empty(COPIED, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPIED / timed(lambda: target.copy_(source))
