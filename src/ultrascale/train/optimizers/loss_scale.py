"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2): scales small gradients into fp16's range.

    loss x scale -> backward pass in fp16 -> gradients summed over ranks in fp32 -> / scale -> norm -> clip -> update
                                                                                     |
                                              not finite: no update, scale x backoff_factor; else after growth_steps x growth

fp16 holds 6e-8 to 65504. Multiplying the loss by 2^16 makes its gradients 2^16 times as large, so that small ones do not
underflow to zero; one that is too large becomes infinite, and shows in the norm of the *global* gradient, which every rank has
to the same bits after one sum over all of them (`parallel.share`). So every rank of every axis decides alike without an extra
message. torch's GradScaler checks the gradients of one rank (its sharded form sums over one process group): a rank of tp, of a
pipeline or of experts that overflowed alone would skip alone, and the ranks would diverge.

Scales are powers of two, so that dividing by one changes no bit of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any

import torch
from torch import nn

from ultrascale.description.run import LossScale
from ultrascale.parallel.share import local_gradient
from ultrascale.torch_private import multiply_all
from ultrascale.train.step import Observer, Step


class DynamicScale:
    """Current loss scale of a run, equal on every rank."""

    def __init__(self, settings: LossScale):
        self.settings = settings
        self.value = settings.initial
        self.steps_since_change = 0

    @property
    def is_lowest(self) -> bool:
        """True if another overflow would lower the scale below `lowest`."""
        return self.value * self.settings.backoff_factor < self.settings.lowest

    def after_step(self, *, overflowed: bool) -> None:
        """Lower the scale after an overflow; raise it after `growth_steps` updates without one."""
        self.steps_since_change = 0 if overflowed else self.steps_since_change + 1
        if overflowed:
            self.value *= self.settings.backoff_factor
        elif self.steps_since_change == self.settings.growth_steps:
            self.value, self.steps_since_change = self.value * self.settings.growth_factor, 0

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, from which the scale continues unchanged."""
        return {"value": self.value, "steps_since_change": self.steps_since_change}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`."""
        self.value, self.steps_since_change = state["value"], state["steps_since_change"]


@torch.no_grad()
def unscale(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide all gradients of this rank by `scale`, in place."""
    gradients = [gradient for p in parameters if (gradient := local_gradient(p)) is not None]
    if gradients:
        multiply_all(gradients, 1 / scale)


class LossScaling(Observer):
    """Scales the losses for fp16 and unscales the gradients; skips a step that overflows."""

    @property
    def scale(self) -> DynamicScale:
        """The run's loss scale."""
        assert self.trainer.loss_scale is not None
        return self.trainer.loss_scale

    def around(self, step: Step, play: Callable[[], None]) -> None:
        """Scale the losses."""
        step.loss_scale = self.trainer.passes.loss_scale = self.scale.value
        play()

    def reduced(self, step: Step) -> None:
        """Divide the gradients by the scale."""
        unscale(self.trainer.share.parameters(), self.scale.value)

    def measured(self, step: Step) -> None:
        """Mark an overflow, unless the scale is the lowest already."""
        step.overflowed = isfinite(step.loss) and not isfinite(step.norm) and not self.scale.is_lowest

    def updated(self, step: Step) -> None:
        """Count an update."""
        self.scale.after_step(overflowed=False)

    def passed_over(self, step: Step) -> None:
        """Lower the scale after an overflow; an anomaly does not change it."""
        if not step.anomaly:
            self.scale.after_step(overflowed=True)


class DelayedScaling(Observer):
    """Advances the amax history of fp8 (`parallel.precision.fp8_history`) with updates, and only with them."""

    def updated(self, step: Step) -> None:
        """Add the amaxes of the passes to the history."""
        if (history := self.trainer.share.amax_history) is not None:
            history.accept()

    def passed_over(self, step: Step) -> None:
        """Discard the amaxes of the passes."""
        if (history := self.trainer.share.amax_history) is not None:
            history.forget()
