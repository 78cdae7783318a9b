"""What crashes cost: how often a cluster stops, how often to save, and the share of time that is lost.

    mean time between stops    M = 1 / (nodes x stops per node-day)
    best interval of saves     sqrt(2 C M)          Young 1974; Daly 2006, first order
    share of time lost         sqrt(2 C / M) + R / M

C: what a save stops training for. R: from a stop to the next step. All layouts of a cluster stop alike, so that their ranking
does not see it; the number of nodes does.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

STOPS_PER_NODE_DAY = 419 / 54 / 2048
"""Unexpected stops of Llama 3 405B: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
RESTART_SECONDS = 600.0
"""From a crash to the next step: found, started again, loaded; assumed."""
SAVE_SECONDS = 10.0
"""That a save holds training up where the rest of it goes on beside steps; assumed."""
DAY = 86_400.0


@dataclass(frozen=True)
class Stops:
    """Of a run on so many nodes."""

    between_seconds: float
    """Mean time between two."""
    save_every_seconds: float
    lost_share: float
    """Of the time, to saves, to steps done again and to starting again; at most 1."""


def stops(num_nodes: int) -> Stops:
    """What crashes cost a run on `num_nodes`."""
    between = DAY / (num_nodes * STOPS_PER_NODE_DAY)
    lost = sqrt(2 * SAVE_SECONDS / between) + RESTART_SECONDS / between
    return Stops(between, sqrt(2 * SAVE_SECONDS * between), min(lost, 1.0))
