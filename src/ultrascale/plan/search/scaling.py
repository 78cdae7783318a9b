"""Scaling: the best layout at each count of GPUs, what each added GPU brings, and how many still pay off.

The global batch stays, so more GPUs mean fewer micro-batches each: bubbles and exposed communication grow, and at some count an
added GPU brings less than it costs. Where that is depends on what waiting costs; `PAYS` is our line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.catalogue.machines import ACCELERATORS, USUAL_NODE
from ultrascale.catalogue.racks import places_used, resized
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.search.search import fastest
from ultrascale.plan.search.space import Asked
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.workload import Workload

PAYS = 0.5
"""An added GPU pays while it brings at least this share of what a GPU brings where each brings most."""
DOUBLINGS = 3
"""Counts are tried from an eighth to eight times the cluster."""
NEAREST = 3
"""Better accelerators that are compared."""
BF16 = "bf16"
MOST_GPUS = 2**17
"""Nobody has more in one training."""


@dataclass(frozen=True)
class Scaled:
    """The best layout on one number of GPUs."""

    num_gpus: int
    best: Prediction | None
    """None if nothing fits, or no layout is legal."""
    brings: float | None
    """Tokens per second of each added GPU, over those of a GPU where each brings most; None for the first that fits."""

    @property
    def pays(self) -> bool:
        return self.best is not None and (self.brings is None or self.brings >= PAYS)


def scaling(
    workload: Workload, *, base: Layout | None = None, asked: Asked | None = None, best: Prediction | None = None
) -> list[Scaled]:
    """The best layout for an eighth to eight times as many GPUs, the batch unchanged. `best`: that of the cluster, if known."""
    asked = {name: values for name, values in (asked or {}).items() if name != "dp"}
    found: list[Scaled] = []
    own = workload.cluster.num_accelerators
    bests = [
        (count, best if best and count == own else _best(workload, count, base, asked)) for count in counts(workload.cluster)
    ]
    per_gpu = max((one.tokens_per_second_per_gpu for _, one in bests if one), default=0.0)
    before: Prediction | None = None
    for count, one in bests:
        brings = None
        if one is not None and before is not None:
            added = one.layout.world_size - before.layout.world_size
            brings = (one.tokens_per_second - before.tokens_per_second) / added / per_gpu
        found.append(Scaled(count, one, brings))
        before = one or before
    return found


def most_that_pay(found: Iterable[Scaled]) -> Scaled | None:
    """The largest count up to which every step of the scan pays; None if nothing fits."""
    last = None
    for one in found:
        if one.best is not None and not one.pays:
            break
        last = one if one.best is not None else last
    return last


def counts(cluster: Cluster) -> list[int]:
    """Numbers of devices to try: halves and doubles, in whole nodes above one."""
    node, own = cluster.node, cluster.num_accelerators
    down = [own >> n for n in range(DOUBLINGS, 0, -1) if own % (1 << n) == 0]
    up = [own << n for n in range(DOUBLINGS + 1)]
    if node.tray is not None and node.places is None:
        return [n for n in (*down, *up) if places_used(n, node)]
    return [n for n in (*down, *up) if n <= node.num_accelerators or n % node.num_accelerators == 0]


def elsewhere(
    workload: Workload, *, base: Layout | None = None, asked: Asked | None = None, best: Prediction | None = None
) -> list[tuple[Cluster, Prediction]]:
    """The best layout on as many of the nearest better accelerators, in their usual nodes: those whose step is shorter.

    Better: no lower peak and no less memory. `best`: what must be beaten; None if nothing fits here.
    """
    found = []
    for name in _better(workload.cluster):
        try:
            cluster = parse_cluster(f"{workload.cluster.num_accelerators}x{name}")
        except SpecError:  # so many do not fill nodes of that kind
            continue
        one = _best(replace(workload, cluster=cluster), cluster.num_accelerators, base, asked)
        if one is not None and (best is None or one.step_seconds < best.step_seconds):
            found.append((cluster, one))
        if len(found) == NEAREST:
            break
    return found


def _better(cluster: Cluster) -> list[str]:
    """Accelerators with no lower peak and no less memory, the nearest first."""
    own, better = cluster.accelerator, []
    for name in USUAL_NODE:
        other = ACCELERATORS[name]
        peaks = [one.peak_flops[BF16].value if BF16 in one.peak_flops else 0.0 for one in (own, other)]
        sizes = [one.memory_bytes.value for one in (own, other)]
        if peaks[1] >= peaks[0] and sizes[1] >= sizes[0] and (peaks[1], sizes[1]) != (peaks[0], sizes[0]):
            better.append((peaks[1] / max(peaks[0], 1.0) * sizes[1] / sizes[0], name))
    return [name for _, name in sorted(better)]


def _best(workload: Workload, count: int, base: Layout | None, asked: Asked | None) -> Prediction | None:
    return fastest(replace(workload, cluster=resized(workload.cluster, count)), base=base, asked=asked)


def smallest_that_fits(workload: Workload, *, base: Layout | None = None, asked: Asked | None = None) -> Prediction | None:
    """The best layout on the smallest number of GPUs, by doublings, that has one that fits; None if none does."""
    count = workload.cluster.num_accelerators
    while (count := 2 * count) <= MOST_GPUS:
        if best := _best(workload, count, base, asked):
            return best
    return None
