"""How many GPUs still pay off: the best layout at each count, and what each added GPU brings.

The global batch stays, so more GPUs mean fewer micro-batches each: bubbles and exposed communication grow, and at some count an
added GPU brings less than it costs. Where that is depends on what waiting costs; `PAYS` is our line.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ultrascale.plan.price import Prediction
from ultrascale.plan.search import fastest
from ultrascale.plan.space import Asked
from ultrascale.plan.workload import Workload
from ultrascale.spec.cluster import Cluster, parse_cluster
from ultrascale.spec.layout import Layout
from ultrascale.spec.machines import ACCELERATORS, USUAL_NODE
from ultrascale.spec.problems import SpecError

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


def scaling(workload: Workload, *, base: Layout | None = None, asked: Asked | None = None) -> list[Scaled]:
    """The best layout for an eighth to eight times as many GPUs, the batch unchanged."""
    asked = {name: values for name, values in (asked or {}).items() if name != "dp"}
    found: list[Scaled] = []
    bests = [(count, _best(workload, count, base, asked)) for count in counts(workload.cluster)]
    per_gpu = max((best.tokens_per_second_per_gpu for _, best in bests if best), default=0.0)
    before: Prediction | None = None
    for count, best in bests:
        brings = None
        if best is not None and before is not None:
            added = best.layout.world_size - before.layout.world_size
            brings = (best.tokens_per_second - before.tokens_per_second) / added / per_gpu
        found.append(Scaled(count, best, brings))
        before = best or before
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
    per_node, own = cluster.node.num_accelerators, cluster.num_accelerators
    down = [own >> n for n in range(DOUBLINGS, 0, -1) if own % (1 << n) == 0]
    up = [own << n for n in range(DOUBLINGS + 1)]
    return [n for n in (*down, *up) if n <= per_node or n % per_node == 0]


def elsewhere(
    workload: Workload, *, base: Layout | None = None, asked: Asked | None = None
) -> list[tuple[Cluster, Prediction | None]]:
    """The best layout on as many of the nearest better accelerators: no slower and no smaller, in their usual nodes."""
    own, count = workload.cluster.accelerator, workload.cluster.num_accelerators
    better = []
    for name in USUAL_NODE:
        other = ACCELERATORS[name]
        peaks = [one.peak_flops[BF16].value if BF16 in one.peak_flops else 0.0 for one in (own, other)]
        sizes = [one.memory_bytes.value for one in (own, other)]
        if peaks[1] >= peaks[0] and sizes[1] >= sizes[0] and (peaks[1], sizes[1]) != (peaks[0], sizes[0]):
            better.append((peaks[1] / max(peaks[0], 1.0) * sizes[1] / sizes[0], name))
    found = []
    for _, name in sorted(better):
        try:
            cluster = parse_cluster(f"{count}x{name}")
        except SpecError:  # so many do not fill nodes of that kind
            continue
        found.append((cluster, _best(replace(workload, cluster=cluster), count, base, asked)))
        if len(found) == NEAREST:
            break
    return found


def _best(workload: Workload, count: int, base: Layout | None, asked: Asked | None) -> Prediction | None:
    name = f"{count}x{workload.cluster.accelerator.name}"
    cluster = replace(workload.cluster, num_accelerators=count, name=name)
    return fastest(replace(workload, cluster=cluster), base=base, asked=asked)


def smallest_that_fits(workload: Workload, *, base: Layout | None = None, asked: Asked | None = None) -> Prediction | None:
    """The best layout on the smallest number of GPUs, by doublings, that has one that fits; None if none does."""
    count = workload.cluster.num_accelerators
    while (count := 2 * count) <= MOST_GPUS:
        if best := _best(workload, count, base, asked):
            return best
    return None
