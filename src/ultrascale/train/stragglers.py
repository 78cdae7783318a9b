"""Slow ranks, named while the run goes on.

In a step every rank takes as long as the slowest, so wall time tells nothing. What tells is a rank's time without its waits for
others (`heartbeat.waited_seconds`). Of each few steps a rank gives the median, which a pause or two do not move. It is compared
with the ranks that compute the same stage of the pipeline, and a rank is named once it has been slow several times in a row:

    slow    more than LIMIT times the median of the others, and further from it than DEVIATIONS of their spread
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ultrascale import heartbeat
from ultrascale.parallel.mesh import Ranks
from ultrascale.spec.layout import Layout

LIMIT = 1.5
DEVIATIONS = 4.0
MAD_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, of a normal distribution."""
FLOOR_SECONDS = 0.002
"""What a scheduler may take."""
IN_A_ROW = 3
"""Windows. With windows of 4 steps a rank is named after 12 to 16."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, or is so no longer."""

    rank: int
    times: float
    """Its time over the median of the others'; 1 once it has recovered."""
    recovered: bool = False

    def text(self, steps: int) -> str:
        """One line."""
        if self.recovered:
            return f"rank {self.rank} is as fast as the others again"
        return f"rank {self.rank} is slow: its own part of the last {steps} steps took {self.times:.1f} times the others'"


@dataclass
class Judge:
    """Windows in, stragglers out."""

    layout: Layout
    slow_windows: dict[int, int] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)

    def window(self, seconds: Sequence[float]) -> list[Straggler]:
        """Every rank's seconds a step in one more window; what is new."""
        found = []
        for rank in range(len(seconds)):
            times = excess(seconds[rank], [seconds[other] for other in self._peers(rank)])
            self.slow_windows[rank] = self.slow_windows.get(rank, 0) + 1 if times else 0
            if self.slow_windows[rank] == IN_A_ROW and rank not in self.named:
                self.named.add(rank)
                found.append(Straggler(rank, times))
            elif not times and rank in self.named:
                self.named.discard(rank)
                found.append(Straggler(rank, 1.0, recovered=True))
        return found

    def _peers(self, rank: int) -> list[int]:
        """Other ranks that compute the same stages."""
        stage = self.layout.world_size // self.layout.pp
        return [other for other in range(rank // stage * stage, (rank // stage + 1) * stage) if other != rank]


def excess(own: float, others: Sequence[float]) -> float:
    """How many times slower than the others a rank is; 0 if that is no more than chance."""
    if not others:
        return 0.0
    usual = statistics.median(others)
    spread = MAD_TO_SIGMA * statistics.median(abs(one - usual) for one in others)
    is_slow = own > LIMIT * usual and own - usual > max(FLOOR_SECONDS, DEVIATIONS * spread)
    return own / usual if is_slow and usual > 0 else 0.0


class Stragglers:
    """This rank's part in it."""

    def __init__(self, layout: Layout, ranks: Ranks, every_steps: int | None):
        self.judge, self.ranks = Judge(layout), ranks
        self.every = every_steps if ranks.world > 1 else None
        self.seconds: list[float] = []
        self._waited = heartbeat.waited_seconds()

    def after_step(self, seconds: float) -> list[Straggler]:
        """Count a step that took `seconds`, waits included. Collective after every few steps; the same on every rank."""
        waited = heartbeat.waited_seconds()
        self.seconds.append(seconds - (waited - self._waited))
        self._waited = waited
        if self.every is None or len(self.seconds) < self.every:
            return []
        own = torch.zeros(self.ranks.world, dtype=torch.float64)
        own[self.ranks.rank] = statistics.median_low(self.seconds)
        self.seconds = []
        found = self.judge.window(self.ranks.sum(own).tolist())
        self._waited = heartbeat.waited_seconds()
        return found
