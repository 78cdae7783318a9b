"""AdamW with narrow moments, by every form: one update of a matrix in fp32, for `kernel_speed.py`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ultrascale.kernels.choice.fused_contest import UPDATES
from ultrascale.kernels.choice.implementation import Kernel
from ultrascale.kernels.optimizers.narrow_moments import FIRST, SECOND, Moments, Update, WeightBox, empty_moments, update_

MOVES = {"adamw-bf16": 20.0, "adamw-8bit": 16.0 + 4 * 4 / 256}
"""Bytes of an element that any form must read or write: gradient, master, moments and their scales."""
HOW = Update(1e-3, 0.1, 0.9, 0.95, 1e-8, count=1, keys=(1, 2))


class UpdateForm(NamedTuple):
    """One form, with weights and moments of its own."""

    update: Callable[[], None]
    """Once more."""
    found: Callable[[], list[Tensor]]
    """The weights and both moments, widened."""


def update_forms(name: Kernel, rows: int, columns: int, device: torch.device) -> dict[str, UpdateForm]:
    """Every form that is here, on the same numbers, torch's first."""

    def begun(form: Callable[[Tensor, Tensor, Moments], None]) -> UpdateForm:
        random = torch.Generator(device).manual_seed(0)
        weights, gradients = (torch.randn(rows, columns, generator=random, device=device) for _ in range(2))
        box = WeightBox((0, 0), (rows, columns), (rows, columns))
        store = Moments(empty_moments(box, UPDATES[name], weights), box)
        moments = lambda: (store.whole(moment).to(device) for moment in (FIRST, SECOND))  # noqa: E731
        return UpdateForm(lambda: form(weights, gradients, store), lambda: [weights, *moments()])

    forms = {"torch": begun(_plain)}
    if device.type == "cuda":
        forms["compiled"] = begun(torch.compile(_plain))
    if find_spec("triton") is not None:
        forms["triton"] = begun(_fused)
    return forms


def _plain(weights: Tensor, gradients: Tensor, store: Moments) -> None:
    update_(weights, gradients, store, HOW)


def _fused(weights: Tensor, gradients: Tensor, store: Moments) -> None:
    from ultrascale.kernels.optimizers.triton_adamw import update_ as fused_

    fused_(weights, gradients, store.state, store.rows, HOW)
