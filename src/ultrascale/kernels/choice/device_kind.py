"""Kind of device that computes: `cpu` or `cuda`. Whoever chooses between kernels or messages asks here.

A tensor on the meta device has shapes and no memory, and stands for one on another device: for the CPU, unless whoever made it
says otherwise. So `ultrascale trace` runs the choices of a cluster's GPUs on a laptop without any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["cpu", "cuda"]
_STANDS_FOR: dict[str, str] = {"meta": "cpu"}
"""The one state that modules share: kernels have no other argument in which it could come to them."""


def kind_of(where: Tensor | torch.device) -> str:
    """`cpu`, `cuda`, or another type of torch's; of the meta device the one it stands for."""
    device = where.device if isinstance(where, Tensor) else where
    return _STANDS_FOR.get(device.type, device.type)


def is_cuda(where: Tensor | torch.device) -> bool:
    """True if it is computed on CUDA."""
    return kind_of(where) == "cuda"


@contextmanager
def meta_stands_for(kind: Kind) -> Iterator[None]:
    """Inside, the meta device stands for this one."""
    before = _STANDS_FOR["meta"]
    _STANDS_FOR["meta"] = kind
    try:
        yield
    finally:
        _STANDS_FOR["meta"] = before
