"""Slow ranks, reported while the run continues.

In a step every rank takes as long as the slowest, so wall time does not identify it. A rank's time without its waits for others
does (`heartbeat.waited_seconds`). Every few steps (a window) each rank reports its median, which a pause or two do not change.
It is compared with the ranks that compute the same pipeline stage, over the last WINDOWS windows together:

    slowness    mean of log(rank's median / median of its peers), each window clipped to log(MOST): two bad windows name no
                rank, three windows of a rank that is at least twice as slow do
    slow        slowness above log(LIMIT), and further from the peers' than DEVIATIONS of their spread

A mean of four windows has half the noise of one, so a limit high enough to exclude chance still detects a rank 2.0 times
slower: of 3,000 simulated ones with heavy-tailed noise 2,993 were named within 20 steps. Requiring three windows in a row above
the limit, each on its own, missed one in ten.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

import torch

from ultrascale import heartbeat
from ultrascale.description.layout import Layout
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.session.moments import LoopObserver, Session, StepDone

LIMIT, MOST, RECOVERED = 1.5, 2.0, 1.2
DEVIATIONS = 4.0
MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation, for a normal distribution."""
FLOOR_SECONDS = 0.002
"""Smallest difference in seconds that counts; smaller ones may come from the operating system's scheduler."""
WINDOWS = 4
"""Windows judged together. With windows of 4 steps a rank is named 12 to 20 steps after it became slow."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has become slow, or has recovered."""

    rank: int
    times: float
    """Its time over the median of its peers; 1 once it has recovered."""
    recovered: bool = False

    def text(self, steps: int) -> str:
        """One line about the rank."""
        if self.recovered:
            return f"rank {self.rank} is as fast as the others again"
        return f"rank {self.rank} is slow: its own part of the last {steps} steps took {self.times:.1f} times the others'"


@dataclass
class Judge:
    """Finds stragglers from windows of step times."""

    layout: Layout
    last: deque[list[float]] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    """For the last windows: every rank's log of its time over its peers' median."""
    named: set[int] = field(default_factory=set)

    def window(self, seconds: Sequence[float]) -> list[Straggler]:
        """Add a window: every rank's seconds per step. Returns ranks that became slow or recovered."""
        self.last.append([log_excess(time, [seconds[peer] for peer in self._peers(rank)]) for rank, time in enumerate(seconds)])
        if len(self.last) < WINDOWS:
            return []
        slowness = [statistics.fmean(min(excess, log(MOST)) for excess in windows) for windows in zip(*self.last, strict=True)]
        stragglers = []
        for rank, excess in enumerate(slowness):
            if rank not in self.named and is_slow(excess, [slowness[peer] for peer in self._peers(rank)]):
                self.named.add(rank)
                stragglers.append(Straggler(rank, exp(statistics.median_high(windows[rank] for windows in self.last))))
            elif rank in self.named and excess < log(RECOVERED):
                self.named.discard(rank)
                stragglers.append(Straggler(rank, 1.0, recovered=True))
        return stragglers

    def _peers(self, rank: int) -> list[int]:
        """Other ranks that compute the same stages."""
        stage = self.layout.world_size // self.layout.pp
        return [other for other in range(rank // stage * stage, (rank // stage + 1) * stage) if other != rank]


def log_excess(seconds: float, peers: Sequence[float]) -> float:
    """Log of a rank's time over the median of its peers; 0 if the scheduler may explain the difference."""
    usual = statistics.median(peers) if peers else 0.0
    return log(seconds / usual) if usual > 0 and seconds > 0 and abs(seconds - usual) > FLOOR_SECONDS else 0.0


def is_slow(slowness: float, peers: Sequence[float]) -> bool:
    """True if a rank's slowness (log of its time over its peers') is above `LIMIT`, and an outlier among its `peers`."""
    if not peers:
        return False
    usual = statistics.median(peers)
    spread = MAD_TO_SIGMA * statistics.median(abs(peer - usual) for peer in peers)
    return slowness > log(LIMIT) and slowness - usual > DEVIATIONS * spread


class Stragglers(LoopObserver):
    """This rank's part in the search for stragglers."""

    def __init__(self, layout: Layout, ranks: Ranks, every_steps: int):
        self.judge, self.ranks, self.every = Judge(layout), ranks, every_steps
        self.seconds: list[float] = []
        self._waited = heartbeat.waited_seconds()

    def after_step(self, session: Session, done: StepDone) -> None:
        """Report slow ranks."""
        for straggler in self.count(done.seconds):
            text = straggler.text(WINDOWS * self.every)
            session.metrics.line(text)
            session.metrics.event("straggler", step=session.trainer.steps_done, rank=straggler.rank, cause=text)

    def count(self, seconds: float) -> list[Straggler]:
        """Count a step that took `seconds`, waits included. Collective after every few steps; the same on every rank."""
        waited = heartbeat.waited_seconds()
        self.seconds.append(seconds - (waited - self._waited))
        self._waited = waited
        if len(self.seconds) < self.every:
            return []
        times = torch.zeros(self.ranks.world, dtype=torch.float64)
        times[self.ranks.rank] = statistics.median_low(self.seconds)
        self.seconds = []
        stragglers = self.judge.window(self.ranks.sum(times).tolist())
        self._waited = heartbeat.waited_seconds()
        return stragglers
