"""Slow ranks, named while the run goes on.

In a step every rank takes as long as the slowest, so wall time tells nothing. What tells is a rank's time without its waits for
others (`heartbeat.waited_seconds`). Of each few steps a rank gives the median, which a pause or two do not move. It is compared
with the ranks that compute the same stage of the pipeline, over the last WINDOWS windows together:

    slowness    mean of log(own median / median of the others'), each window for no more than log(MOST): two bad windows name
                nobody, three of a rank that is twice as slow or more do
    slow        slowness above log(LIMIT), and further from the others' own than DEVIATIONS of their spread

A mean of four windows has half the noise of one, so a limit that no chance reaches still finds a rank 2.0 times slower: of
3,000 simulated ones with heavy-tailed noise 2,993 were named within 20 steps. Three windows in a row above the limit, each
judged for itself, missed one in ten.
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
"""Median absolute deviation to standard deviation, of a normal distribution."""
FLOOR_SECONDS = 0.002
"""Difference in seconds that the operating system's scheduler may cause; a smaller one counts as none."""
WINDOWS = 4
"""Judged together. With windows of 4 steps a rank is named 12 to 20 steps after it became slow."""


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
    last: deque[list[float]] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    """Every rank's log of own time over the others', of the last windows."""
    named: set[int] = field(default_factory=set)

    def window(self, seconds: Sequence[float]) -> list[Straggler]:
        """Every rank's seconds a step in one more window; what is new."""
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
    """The log of a rank's time over the median of the others'; 0 where the difference is what a scheduler may take."""
    usual = statistics.median(peers) if peers else 0.0
    return log(seconds / usual) if usual > 0 and seconds > 0 and abs(seconds - usual) > FLOOR_SECONDS else 0.0


def is_slow(slowness: float, peers: Sequence[float]) -> bool:
    """True if a rank's slowness (log of its time over the others') is above `LIMIT`, and an outlier among its `peers`."""
    if not peers:
        return False
    usual = statistics.median(peers)
    spread = MAD_TO_SIGMA * statistics.median(abs(peer - usual) for peer in peers)
    return slowness > log(LIMIT) and slowness - usual > DEVIATIONS * spread


class Stragglers(LoopObserver):
    """This rank's part in it, of several."""

    def __init__(self, layout: Layout, ranks: Ranks, every_steps: int):
        self.judge, self.ranks, self.every = Judge(layout), ranks, every_steps
        self.seconds: list[float] = []
        self._waited = heartbeat.waited_seconds()

    def after_step(self, session: Session, done: StepDone) -> None:
        """Name who is slow."""
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
