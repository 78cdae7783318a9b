"""What backward passes left."""

from __future__ import annotations

from torch import Tensor


def grad_of(tensor: Tensor | None) -> Tensor:
    """Of a parameter or an input, [the shape of it]; an AssertionError where there is none."""
    assert tensor is not None and tensor.grad is not None
    return tensor.grad
