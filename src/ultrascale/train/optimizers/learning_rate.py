"""The learning rate as a pure function of the step."""

from __future__ import annotations

from math import cos, pi

from ultrascale.description.run import Optimizer


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """The learning rate of `step` (counted from zero) of a run of `steps` steps.

    Linear warm-up to the peak, then `optimizer.schedule` (cosine: Loshchilov and Hutter 2017; wsd: Hu et al. 2024).
    """
    peak, floor = optimizer.learning_rate, optimizer.learning_rate * optimizer.min_learning_rate_ratio
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    start = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        decay = optimizer.decay_steps if optimizer.decay_steps is not None else max(1, steps // 10)
        start = max(start, steps - decay)
    done = min(1.0, max(0.0, (step + 1 - start) / max(1, steps - start)))
    shares = {"cosine": (1 + cos(pi * done)) / 2, "linear": 1 - done, "wsd": 1 - done}
    return floor + (peak - floor) * shares[optimizer.schedule]
