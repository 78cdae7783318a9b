"""Kind of device that computes: `cpu` or `cuda`. All choices between kernels or messages use it.

A tensor on the meta device has a shape and no memory, and stands for one on another device: the CPU, unless set otherwise. So
`ultrascale trace` makes the choices of a cluster's GPUs on a laptop without any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["cpu", "cuda"]
_STANDS_FOR: dict[str, str] = {"meta": "cpu"}
"""The only global state that modules share: kernels have no argument that could carry it."""


def kind_of(where: Tensor | torch.device) -> str:
    """`cpu`, `cuda`, or another torch device type; for the meta device the one it stands for."""
    device = where.device if isinstance(where, Tensor) else where
    return _STANDS_FOR.get(device.type, device.type)


def is_cuda(where: Tensor | torch.device) -> bool:
    """True if it is, or stands for being, on CUDA."""
    return kind_of(where) == "cuda"


@contextmanager
def meta_stands_for(kind: Kind) -> Iterator[None]:
    """Context in which the meta device stands for this kind."""
    before = _STANDS_FOR["meta"]
    _STANDS_FOR["meta"] = kind
    try:
        yield
    finally:
        _STANDS_FOR["meta"] = before
