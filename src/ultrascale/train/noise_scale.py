"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018, appendix A.1).

Two estimates of the squared gradient norm, from small batches (one micro-batch of one rank) and from the whole step, separate
signal |G|^2 from noise S = tr(covariance). Their ratio S / |G|^2 is the critical batch size: far below it more batch buys
proportionally fewer steps, far above it nothing. Here in tokens, smoothed over steps, as numerator and denominator apart.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn


class NoiseScale:
    """Watches gradients as they are made and keeps the running estimate.

    Hooks see each micro-batch's gradient of each parameter before it is added to or reduced with others; one norm of every
    gradient is the price.
    """

    def __init__(self, decoder: nn.Module, *, smoothing: float = 0.95):
        self.smoothing = smoothing
        self.signal = self.noise = self.weight = 0.0
        self._squares: list[torch.Tensor] = []
        self._hooked: set[nn.Parameter] = set()
        # Gathered parameters exist only once the forward pass of their bucket has begun.
        blocks = list(cast(nn.ModuleList, decoder.layers))
        for module in [*blocks, *(child for child in decoder.children() if child is not decoder.layers)]:
            module.register_forward_pre_hook(self._hook_parameters)

    def take_small_square(self) -> float:
        """Squared norm of the gradient since the last call (one micro-batch)."""
        total = float(torch.stack(self._squares).double().sum()) if self._squares else 0.0
        self._squares.clear()
        return total

    def update(self, *, small_square: float, small_tokens: float, big_square: float, big_tokens: float) -> float | None:
        """Take in one step and return the noise scale in tokens, or None while it is not yet known.

        `small_square` is the mean over small batches of |gradient of the mean loss of its tokens|^2; `big_square` the same for
        the whole step.
        """
        if big_tokens > small_tokens > 0:
            signal = (big_tokens * big_square - small_tokens * small_square) / (big_tokens - small_tokens)
            noise = (small_square - big_square) / (1 / small_tokens - 1 / big_tokens)
            keep = self.smoothing
            self.signal = keep * self.signal + (1 - keep) * signal
            self.noise = keep * self.noise + (1 - keep) * noise
            self.weight = keep * self.weight + (1 - keep)
        return self.noise / self.signal if self.signal > 0 and self.noise > 0 else None

    def state(self) -> dict[str, float]:
        """What a checkpoint needs to go on with the same estimate."""
        return {"signal": self.signal, "noise": self.noise, "weight": self.weight}

    def load_state(self, state: dict[str, float]) -> None:
        """Go on from `state`."""
        self.signal, self.noise, self.weight = state["signal"], state["noise"], state["weight"]

    def _hook_parameters(self, module: nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        for parameter in module.parameters():
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_hook(self._see)

    def _see(self, gradient: torch.Tensor) -> None:
        self._squares.append(gradient.detach().float().square().sum())
