"""Cost of failures: mean time between failures, optimal checkpoint interval, spare nodes, and the goodput.

    mean time between stops    M = 1 / (accelerators x stops per accelerator-day)
    best interval of saves     T = sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + C / 18 M) - C     Young 1974; Daly 2006
    goodput                    T / (M exp(R / M) (exp((T + C) / M) - 1))                  Daly 2006, exact for random stops
    spares                     nodes that are being repaired at once: Poisson, of mean stops x repair time

C: seconds that a save stops training. R: from a stop to the next step. Goodput is the fraction of the time that contributes to
the model; stops during restarts or saves count too. All layouts of a cluster stop equally often, so the ranking ignores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

from ultrascale.plan.costs.storage import checkpoint_bytes

if TYPE_CHECKING:
    from ultrascale.plan.workload import Workload

STOPS_PER_ACCELERATOR_DAY = 419 / 54 / 16_384
"""Unexpected stops of Llama 3 405B: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""
HARDWARE_SHARE = 0.78
"""Fraction of those stops that take a node out: confirmed or suspected hardware, the same section."""
REPAIR_SECONDS = 86_400.0
"""Seconds until such a node is back; assumed."""
RESTART_SECONDS = 600.0
"""Seconds from a crash to the next step: detection, restart, loading; assumed."""
SAVE_SECONDS = 10.0
"""Seconds that a save blocks training in addition to the copy to the host, if the write overlaps later steps; assumed."""
HOST_BYTES_PER_SECOND = 5e9
"""Bytes per second at which a rank copies from its device to unpinned host memory."""
SPARES_SUFFICE = 0.99
"""Fraction of the time in which the spare nodes are enough."""
DAY = 86_400.0


@dataclass(frozen=True)
class Stops:
    """Failures of a run, the resulting interval of saves, spare nodes and goodput."""

    num_nodes: int
    """Machines, or trays of a rack, each of which is repaired alone."""
    between_seconds: float
    """Mean time between two failures."""
    save_seconds: float
    """Seconds that a save blocks training."""
    save_every_seconds: float
    restart_seconds: float
    goodput: float
    """Fraction of the time that contributes to the model; the rest is spent on saves, repeated steps and restarts."""
    spare_nodes: int

    @property
    def per_day(self) -> float:
        return DAY / self.between_seconds


def stops(workload: Workload) -> Stops:
    """Stops of a run on the workload's cluster. A save takes `save_seconds` if measured, else the planned time; with a storage,
    no save begins before the previous one is written, and a restart reads one. A storage with its own interval fixes the
    interval, and training waits for each write."""
    cluster, storage = workload.cluster, workload.storage
    num_nodes = -(-cluster.num_accelerators // (cluster.node.tray or cluster.node.num_accelerators))
    between = DAY / (cluster.num_accelerators * STOPS_PER_ACCELERATOR_DAY)
    size = checkpoint_bytes(workload)
    written = 0.0 if storage is None else size / storage.bytes_per_second
    save = workload.save_seconds
    if save is None:
        save = SAVE_SECONDS + size / cluster.num_accelerators / HOST_BYTES_PER_SECOND
    every = max(best_interval(save, between), written)
    if storage is not None and storage.checkpoint_seconds is not None:  # the requested interval, and training waits
        save, every = written, storage.checkpoint_seconds
    restart = RESTART_SECONDS + written
    spares = spare_nodes(HARDWARE_SHARE * REPAIR_SECONDS / between)
    return Stops(num_nodes, between, save, every, restart, goodput(every, save, restart, between), min(spares, num_nodes))


def best_interval(save: float, between: float) -> float:
    """Seconds of training between two saves of `save` seconds, if stops come every `between` seconds (Daly 2006)."""
    if save >= 2 * between:
        return between
    share = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(share) / 3 + share / 9) - save


def goodput(every: float, save: float, restart: float, between: float) -> float:
    """Fraction of the time that is kept training, with saves of `save` seconds after each `every`."""
    if (every + save + restart) / between > 700:  # the limit of exp: no training is ever kept
        return 0.0
    return every / (between * exp(restart / between) * (exp((every + save) / between) - 1))


def spare_nodes(mean: float) -> int:
    """Fewest spares that suffice for SPARES_SUFFICE of the time, with `mean` nodes in repair on average."""
    if mean > 500:  # exp(-mean) is 0 for a float above 745, and the normal law is as good
        return round(mean + 2.326 * sqrt(mean) + 0.5)
    count, term = 0, exp(-mean)
    total = term
    while total < SPARES_SUFFICE:
        count += 1
        term *= mean / count
        total += term
    return count
