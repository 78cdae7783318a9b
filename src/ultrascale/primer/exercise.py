"""An exercise of the primer: variants of one computation, checked against torch, and timed on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """One way to compute a result."""

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    """Result by torch, in fp64."""
    num_bytes: int = 0
    """Bytes that must be moved: each input read once, each result written once. Further traffic of a variant is its loss."""
    flops: int = 0
    note: str = ""
    """Note on costs other than time."""


@dataclass(frozen=True)
class Exercise:
    """One lesson."""

    name: str
    """Name on the command line."""
    title: str
    meaning: str
    """Meaning of the numbers, in two lines."""
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class VariantOutcome:
    """Result of a variant."""

    name: str
    error: float
    """Norm of the difference from torch's result in fp64, over the norm of that."""
    is_right: bool
    seconds: float | None
    """Median of many runs in seconds; null (None) in the interpreter, which has no meaningful speed."""
    rate: float | None
    """Bytes or FLOPs per second, counting only what must be moved or computed."""
    unit: str
    """`B/s` or `FLOP/s`."""
    share: float | None
    """Fraction of the device's peak."""
    note: str


TOLERANCE = 2e-2
"""Tolerance for bf16: 8 bits of mantissa, and sums of some thousand terms. fp32 is right to 1e-5; one limit suffices to detect
a wrong kernel."""


def outcome(variant: Variant, *, device: torch.device, peak_bytes: float | None, peak_flops: float | None) -> VariantOutcome:
    """Run, check and, on a GPU, time a variant. Peaks are per second."""
    expected = variant.expected().double()
    result = variant.run().double()
    error = float((result - expected).norm() / expected.norm())
    seconds = timed(variant.run) if device.type == "cuda" else None
    unit, amount, peak = ("FLOP/s", variant.flops, peak_flops) if variant.flops else ("B/s", variant.num_bytes, peak_bytes)
    rate = None if seconds is None else amount / seconds
    share = None if rate is None or peak is None else rate / peak
    return VariantOutcome(variant.name, error, error < TOLERANCE, seconds, rate, unit, share, variant.note)


def timed(run: Callable[[], Any]) -> float:
    """Median seconds on the device."""
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    return float(do_bench(run, warmup=25, rep=100, return_mode="median")) * 1e-3  # pyright: ignore[reportArgumentType]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a Triton kernel on a grid of programs."""
    kernel[grid](*arguments, **options)


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers around zero, the same on every run."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, device=device, generator=generator).to(dtype)


def narrow(device: torch.device) -> torch.dtype:
    """The dtype for tensor cores; the interpreter computes with NumPy, which has no bf16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def pick(device: torch.device, on_gpu: int, in_interpreter: int) -> int:
    """A size that fills a GPU, or one that the interpreter computes in a moment."""
    return on_gpu if device.type == "cuda" else in_interpreter
