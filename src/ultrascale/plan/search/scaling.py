"""Scaling: the best layout at each number of GPUs, the speed that each added GPU brings, and how many pay off.

The global batch stays the same, so more GPUs mean fewer micro-batches each: bubbles and exposed communication grow, until an
added GPU brings less than it costs. That point depends on the cost of waiting; `PAYS` is our threshold.
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
"""An added GPU pays off while its tokens per second are at least this fraction of the highest tokens per second per GPU."""
DOUBLINGS = 3
"""GPU counts are tried from 1/8 to 8 times the cluster."""
NEAREST = 3
"""Number of better accelerators that are compared."""
BF16 = "bf16"
MOST_GPUS = 2**17
"""Largest number of GPUs tried: no known training uses more."""
BISECTIONS = 2
"""Halvings of the step from a number of GPUs that is too small to one that fits: a quarter of the former is told apart."""


@dataclass(frozen=True)
class ScalingPoint:
    """The best layout on one number of GPUs."""

    num_gpus: int
    best: Prediction | None
    """None if nothing fits, or no layout is legal."""
    marginal_efficiency: float | None
    """Tokens per second of each added GPU over the highest tokens per second per GPU of the scan; None for the first that
    fits."""

    @property
    def pays(self) -> bool:
        return self.best is not None and (self.marginal_efficiency is None or self.marginal_efficiency >= PAYS)


def scaling(
    workload: Workload, *, base: Layout | None = None, constraints: Constraints | None = None, best: Prediction | None = None
) -> list[ScalingPoint]:
    """The best layout for 1/8 to 8 times as many GPUs with the same batch. `best`: that of the cluster, if known."""
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
    """The largest number of GPUs up to which every step of the scan pays off; None if nothing fits."""
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
    """The best layout on the same number of better accelerators in their usual nodes, where the step is shorter.

    Better: neither peak FLOPs nor memory is lower; the `NEAREST` are tried. `best`: the prediction to beat; None if nothing
    fits here.
    """
    better = []
    for name in _better(workload.cluster):
        try:
            cluster = parse_cluster(f"{workload.cluster.num_accelerators}x{name}")
        except SpecError:  # this number does not fill nodes of that kind
            continue
        prediction = _fastest_at(replace(workload, cluster=cluster), cluster.num_accelerators, base, constraints)
        if prediction is not None and (best is None or prediction.step_seconds < best.step_seconds):
            better.append((cluster, prediction))
        if len(better) == NEAREST:
            break
    return better


def _better(cluster: Cluster) -> list[str]:
    """Accelerators whose peak FLOPs and memory are not lower, the nearest first."""
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
    """The best layout on the smallest number of GPUs on which one fits: by doubling, then by halving the step at most
    `BISECTIONS` times, in whole nodes or trays of a rack. None if none does."""
    node, too_few = workload.cluster.node, workload.cluster.num_accelerators
    best = None
    while 2 * too_few <= MOST_GPUS and not (best := _fastest_at(workload, 2 * too_few, base, constraints)):
        too_few *= 2
    if best is None:
        return None
    enough, unit = 2 * too_few, node.tray or node.num_accelerators
    for _ in range(BISECTIONS):
        middle = (too_few + enough) // 2 // unit * unit
        if not too_few < middle < enough or (node.tray and node.places is None and not places_used(middle, node)):
            break
        if fewer := _fastest_at(workload, middle, base, constraints):
            best, enough = fewer, middle
        else:
            too_few = middle
    return best
