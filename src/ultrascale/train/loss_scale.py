"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2): small gradients lifted into what fp16 can hold.

    loss x scale -> backward pass in fp16 -> gradients summed over ranks in fp32 -> / scale -> norm -> clip -> update
                                                                                     |
                                              not finite: no update, scale x backoff_factor; else after growth_steps x growth

fp16 holds 6e-8 to 65504. The backward pass of a loss that is multiplied by 2^16 has gradients 2^16 times as large, and what
would have been zero is not; one that is too large becomes infinite, and shows in the norm of the *whole* gradient, which every
rank has to the same bits after one sum over all of them (`parallel.share`). So every rank of every axis decides alike without
a message of its own. torch's GradScaler looks at the gradients of one rank (its sharded form sums over one process group): a
rank of tp, of a pipeline or of experts that overflowed alone would skip alone, and the ranks would part ways.

Scales are powers of two, so that dividing by one changes no bit of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ultrascale.parallel.share import local_gradient
from ultrascale.spec.run import LossScale


class DynamicScale:
    """The scale of a run as it goes, equal on every rank."""

    def __init__(self, settings: LossScale):
        self.settings = settings
        self.value = settings.initial
        self.steps_since_change = 0

    @property
    def is_lowest(self) -> bool:
        """Whether another overflow could not lower it."""
        return self.value * self.settings.backoff_factor < self.settings.lowest

    def after_step(self, *, overflowed: bool) -> None:
        """Lower the scale after an overflow; raise it after `growth_steps` updates without one."""
        self.steps_since_change = 0 if overflowed else self.steps_since_change + 1
        if overflowed:
            self.value *= self.settings.backoff_factor
        elif self.steps_since_change == self.settings.growth_steps:
            self.value, self.steps_since_change = self.value * self.settings.growth_factor, 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to go on alike."""
        return {"value": self.value, "steps_since_change": self.steps_since_change}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.value, self.steps_since_change = state["value"], state["steps_since_change"]


@torch.no_grad()
def unscale(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide all gradients of this rank by `scale`, in place."""
    gradients = [gradient for p in parameters if (gradient := local_gradient(p)) is not None]
    if gradients:
        torch._foreach_mul_(gradients, 1 / scale)  # pyright: ignore[reportPrivateImportUsage]
