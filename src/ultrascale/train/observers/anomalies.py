"""Steps whose loss or gradient cannot be right: NaN, infinity, a norm far above those before, or no target at all.

Loss and norm have the same bits on every rank after one sum over all of them, and so has what is kept here: every rank decides
alike at the same step, without a message. `faults.on_anomaly` says what is done:

    stop      nothing is updated or saved, the run ends and names the rank and the parameter
    skip      the step updates nothing: weights, moments and the count of updates keep their bits; its sequences are passed over
    rewind    back to the newest checkpoint and once more; what was the machine's fault goes away, to the bits of a run without
              it. If the same step fails again it is skipped
"""

from __future__ import annotations

import statistics
from collections import deque
from math import isfinite

from ultrascale.description.run import Faults

KEPT = 64
"""Norms of updates that a spike is measured by."""
FEWEST = 16
MOST_IN_A_ROW = 8
"""Steps passed over one after the other before that is no way to go on."""


class AnomalousStepError(RuntimeError):
    """A step that must not update anything; raised on every rank before the update."""


class NonFiniteError(AnomalousStepError):
    """A loss or gradient is NaN or infinite; nothing has been updated."""


class CorruptStateError(RuntimeError):
    """Ranks that must hold the same bits do not; raised on every rank."""


class Norms:
    """The norms of the last updates, equal on every rank."""

    def __init__(self, settings: Faults):
        self.settings = settings
        self.last: deque[float] = deque(maxlen=KEPT)
        self.in_a_row = 0
        """Steps passed over since the last update."""

    def judge(self, loss: float, norm: float) -> str:
        """Anomaly of a step in words: loss or gradient norm not finite, or a spike of the norm; empty if there is none."""
        if not (isfinite(loss) and isfinite(norm)):
            return f"loss {loss:g}, norm of the gradient {norm:g}"
        factor = self.settings.spike_factor
        if factor is None or len(self.last) < FEWEST:
            return ""
        usual = statistics.median(self.last)
        return f"norm of the gradient {norm:g}, {norm / usual:.0f} times the usual {usual:g}" if norm > factor * usual else ""

    def accept(self, norm: float) -> None:
        """Count an update."""
        self.last.append(norm)
        self.in_a_row = 0

    def pass_over(self, step: int, reason: str) -> None:
        """Count a step without one. Raises AnomalousStepError if there are too many."""
        self.in_a_row += 1
        if self.in_a_row > MOST_IN_A_ROW:
            problem = f"step {step}: {reason}; so were the {MOST_IN_A_ROW} steps before, which were passed over"
            raise AnomalousStepError(f"{problem}. Lower optimizer.learning_rate, or go back to an older checkpoint.")

    def state(self) -> list[float]:
        """State for a checkpoint: gradient norms of recent steps."""
        return list(self.last)

    def load_state(self, state: list[float]) -> None:
        """Go on from `state`."""
        self.last, self.in_a_row = deque(state, KEPT), 0
