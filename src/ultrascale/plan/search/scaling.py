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
from ultrascale.plan.search.space import Constraints
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
class ScalingPoint:
    """The best layout on one number of GPUs."""

    num_gpus: int
    best: Prediction | None
    """None if nothing fits, or no layout is legal."""
    marginal_efficiency: float | None
    """Tokens per second of each added GPU, over those of a GPU where each brings most; None for the first that fits."""

    @property
    def pays(self) -> bool:
        return self.best is not None and (self.marginal_efficiency is None or self.marginal_efficiency >= PAYS)


def scaling(
    workload: Workload, *, base: Layout | None = None, constraints: Constraints | None = None, best: Prediction | None = None
) -> list[ScalingPoint]:
    """The best layout for an eighth to eight times as many GPUs, the batch unchanged. `best`: that of the cluster, if known."""
    constraints = {name: values for name, values in (constraints or {}).items() if name != "dp"}
    scan: list[ScalingPoint] = []
    num_gpus = workload.cluster.num_accelerators
    bests = [
        (count, best if best and count == num_gpus else _fastest_at(workload, count, base, constraints))
        for count in counts(workload.cluster)
    ]
    per_gpu = max((prediction.tokens_per_second_per_gpu for _, prediction in bests if prediction), default=0.0)
    before: Prediction | None = None
    for count, prediction in bests:
        marginal_efficiency = None
        if prediction is not None and before is not None:
            added = prediction.layout.world_size - before.layout.world_size
            marginal_efficiency = (prediction.tokens_per_second - before.tokens_per_second) / added / per_gpu
        scan.append(ScalingPoint(count, prediction, marginal_efficiency))
        before = prediction or before
    return scan


def most_that_pay(scan: Iterable[ScalingPoint]) -> ScalingPoint | None:
    """The largest count up to which every step of the scan pays; None if nothing fits."""
    last = None
    for scaled in scan:
        if scaled.best is not None and not scaled.pays:
            break
        last = scaled if scaled.best is not None else last
    return last


def counts(cluster: Cluster) -> list[int]:
    """Numbers of devices to try: halves and doubles, in whole nodes above one."""
    node, num_gpus = cluster.node, cluster.num_accelerators
    down = [num_gpus >> n for n in range(DOUBLINGS, 0, -1) if num_gpus % (1 << n) == 0]
    up = [num_gpus << n for n in range(DOUBLINGS + 1)]
    if node.tray is not None and node.places is None:
        return [n for n in (*down, *up) if places_used(n, node)]
    return [n for n in (*down, *up) if n <= node.num_accelerators or n % node.num_accelerators == 0]


def better_clusters(
    workload: Workload, *, base: Layout | None = None, constraints: Constraints | None = None, best: Prediction | None = None
) -> list[tuple[Cluster, Prediction]]:
    """The best layout on as many of the nearest better accelerators, in their usual nodes: those whose step is shorter.

    Better: no lower peak and no less memory. `best`: what must be beaten; None if nothing fits here.
    """
    better = []
    for name in _better(workload.cluster):
        try:
            cluster = parse_cluster(f"{workload.cluster.num_accelerators}x{name}")
        except SpecError:  # so many do not fill nodes of that kind
            continue
        prediction = _fastest_at(replace(workload, cluster=cluster), cluster.num_accelerators, base, constraints)
        if prediction is not None and (best is None or prediction.step_seconds < best.step_seconds):
            better.append((cluster, prediction))
        if len(better) == NEAREST:
            break
    return better


def _better(cluster: Cluster) -> list[str]:
    """Accelerators with no lower peak and no less memory, the nearest first."""
    accelerator, better = cluster.accelerator, []
    for name in USUAL_NODE:
        other = ACCELERATORS[name]
        peaks = [device.peak_flops[BF16].value if BF16 in device.peak_flops else 0.0 for device in (accelerator, other)]
        sizes = [device.memory_bytes.value for device in (accelerator, other)]
        if peaks[1] >= peaks[0] and sizes[1] >= sizes[0] and (peaks[1], sizes[1]) != (peaks[0], sizes[0]):
            better.append((peaks[1] / max(peaks[0], 1.0) * sizes[1] / sizes[0], name))
    return [name for _, name in sorted(better)]


def _fastest_at(workload: Workload, count: int, base: Layout | None, constraints: Constraints | None) -> Prediction | None:
    return fastest(replace(workload, cluster=resized(workload.cluster, count)), base=base, constraints=constraints)


def smallest_that_fits(
    workload: Workload, *, base: Layout | None = None, constraints: Constraints | None = None
) -> Prediction | None:
    """The best layout on the smallest number of GPUs, by doublings, that has one that fits; None if none does."""
    count = workload.cluster.num_accelerators
    while (count := 2 * count) <= MOST_GPUS:
        if best := _fastest_at(workload, count, base, constraints):
            return best
    return None
