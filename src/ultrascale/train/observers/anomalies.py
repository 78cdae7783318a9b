"""Anomalous steps: a loss or gradient that is NaN or infinite, a spike of the gradient norm, or no valid target.

Loss and norm have the same bits on every rank after one sum over all ranks, and so has the history kept here: every rank
decides alike at the same step, without a message. `faults.on_anomaly` sets the response:

    stop      nothing is updated or saved, the run ends and names the rank and the parameter
    skip      the step updates nothing: weights, moments and the count of updates keep their bits; its sequences are skipped
    rewind    back to the newest checkpoint, and retry: after a transient machine fault, this gives the bits of a run without
              it. If the same step fails again it is skipped
"""

from __future__ import annotations

import statistics
from collections import deque
from math import isfinite

from ultrascale.description.run import Faults

KEPT = 64
"""Number of past gradient norms against which a spike is judged."""
FEWEST = 16
MOST_IN_A_ROW = 8
"""Most skipped steps in a row before the run fails."""
NO_TARGET = "no token is a valid target, so there is no loss to train on"
INSPECT = "Look at the data with `ultrascale data inspect`"


class AnomalousStepError(RuntimeError):
    """A step that must not update anything; raised on every rank before the update."""


class NonFiniteError(AnomalousStepError):
    """A loss or gradient is NaN or infinite; nothing has been updated."""


class CorruptStateError(RuntimeError):
    """Replicas that must hold the same bits differ; raised on every rank."""


class Norms:
    """Gradient norms of the last updates, equal on every rank."""

    def __init__(self, settings: Faults):
        self.settings = settings
        self.last: deque[float] = deque(maxlen=KEPT)
        self.in_a_row = 0
        """Steps skipped since the last update."""

    def judge(self, loss: float, norm: float) -> str:
        """Description of a step's anomaly: loss or gradient norm not finite, or a spike of the norm; empty if there is none."""
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
        """Count a skipped step. Raises AnomalousStepError if there are too many in a row."""
        self.in_a_row += 1
        if self.in_a_row > MOST_IN_A_ROW:
            problem = f"step {step}: {reason}; so were the {MOST_IN_A_ROW} steps before, which were passed over"
            remedy = INSPECT if reason == NO_TARGET else "Lower optimizer.learning_rate, or go back to an older checkpoint"
            raise AnomalousStepError(f"{problem}. {remedy}.")

    def state(self) -> list[float]:
        """State for a checkpoint: gradient norms of recent steps."""
        return list(self.last)

    def load_state(self, state: list[float]) -> None:
        """Restore `state`."""
        self.last, self.in_a_row = deque(state, KEPT), 0
