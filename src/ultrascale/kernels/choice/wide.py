"""The dtype of sums: fp32, or fp64 where the terms are."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Dtype of sums over `x`."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def at_least_fp32(x: Tensor) -> Tensor:
    """x, cast to fp32 if it is narrower."""
    return x.to(wide_dtype(x))
