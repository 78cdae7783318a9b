"""The gradient noise scale: the batch size up to which a larger batch pays off (McCandlish et al. 2018, appendix A.1).

Two estimates of the squared gradient norm, from small batches (one micro-batch of one rank) and from the whole step, separate
signal |G|^2 from noise S = tr(covariance). Their ratio S / |G|^2 is the critical batch size: far below it a larger batch saves
proportionally many steps, far above it none. Measured in tokens; numerator and denominator are smoothed separately over steps.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import torch

from ultrascale.train.optimizers.gradients import watched_gradients
from ultrascale.train.step import Observer, Step


class NoiseScale:
    """Running estimate from the squared gradient norms of micro-batches and of steps."""

    def __init__(self, *, smoothing: float = 0.95):
        self.smoothing = smoothing
        self.signal = self.noise = 0.0
        self._squares: list[torch.Tensor] = []

    def see(self, name: str, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient from one micro-batch; for `gradients.watched_gradients`."""
        self._squares.append(gradient.detach().square().sum(dtype=torch.float64))

    def take_small_square(self) -> float:
        """Squared norm of the gradients seen since the last call."""
        total = float(torch.stack(self._squares).sum()) if self._squares else 0.0
        self._squares.clear()
        return total

    def update(self, *, small_square: float, small_tokens: float, big_square: float, big_tokens: float) -> float | None:
        """Add one step and return the noise scale in tokens, or None until it can be estimated.

        `small_square` is the mean over micro-batches of |gradient of the mean loss of its tokens|^2, `big_square` the same for
        the whole step. `small_tokens` is the *harmonic* mean of the micro-batches' tokens: then E[small_square] = |G|^2 + S /
        small_tokens also when documents are masked and micro-batches unequal.
        """
        if big_tokens > small_tokens > 0:
            signal = (big_tokens * big_square - small_tokens * small_square) / (big_tokens - small_tokens)
            noise = (small_square - big_square) / (1 / small_tokens - 1 / big_tokens)
            self.signal = self.smoothing * self.signal + (1 - self.smoothing) * signal
            self.noise = self.smoothing * self.noise + (1 - self.smoothing) * noise
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None

    def state(self) -> dict[str, float]:
        """State for a checkpoint, from which the estimate continues unchanged."""
        return {"signal": self.signal, "noise": self.noise}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore `state`."""
        self.signal, self.noise = state["signal"], state["noise"]


class NoiseMeasured(Observer):
    """Measures squared norms of micro-batches' gradients and of the step's gradient.

    `step.sums` holds, over this rank's micro-batches that have targets: their number, 1 / targets, and the squared norm of the
    gradient of their mean loss.
    """

    @property
    def estimate(self) -> NoiseScale:
        """The run's noise scale."""
        assert self.trainer.noise_scale is not None
        return self.trainer.noise_scale

    def around(self, step: Step, play: Callable[[], None]) -> None:
        """Watch the gradients of every micro-batch."""
        with watched_gradients(self.trainer.share.stages.values(), self.estimate.see):
            play()

    def after_backward(self, step: Step, micro_batch: int) -> None:
        """Add a micro-batch."""
        square, targets = self.estimate.take_small_square(), step.micro_batches[micro_batch].num_targets
        if targets:
            factor = step.num_targets / targets / self.trainer.passes.loss_scale
            step.sums[1:] += torch.tensor([1, 1 / targets, square * factor**2], dtype=torch.float64)

    def measured(self, step: Step) -> None:
        """Add the step to the estimate."""
        _, count, inverse_targets, squares = step.sums.tolist()
        if count and not step.anomaly and isfinite(step.norm):
            step.noise_scale_tokens = self.estimate.update(
                small_square=squares / count,
                small_tokens=count / inverse_targets,
                big_square=step.norm**2,
                big_tokens=step.num_targets,
            )
