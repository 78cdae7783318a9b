"""Uncertainty of a prediction: the risk of running out of memory, and prediction intervals of a step time.

Intervals come from the errors on sources that took no part in the fit.

Split conformal prediction by groups (Vovk et al. 2005, chapter 4): the ratios measured / predicted of all rows, each predicted
with constants fitted without its source, are sorted, and the interval runs between two of their quantiles, a source of n rows
weighing sqrt(n). The level of the quantiles is the lowest whose intervals, found without a source, hold `COVERAGE` of that
source's rows on average. What is wide and what is narrow is told by groups that a row shows before it is run: `kind_of`. The
factors are set from what `benchmarks/plan/cross_validate.py` prints.
"""

from __future__ import annotations

from math import erfc, log, sqrt
from typing import Literal

from ultrascale.description.layout import NARROW, Layout
from ultrascale.plan.workload import Workload

COVERAGE = 0.8
"""Share of runs that an interval is meant to hold."""
Kind = Literal["dense", "fp8", "experts", "eager", "eager on many nodes"]
FACTORS: dict[Kind, tuple[float, float]] = {
    "dense": (0.88, 1.21),
    "fp8": (0.89, 1.26),
    "experts": (0.76, 1.42),
    "eager": (0.87, 1.80),
    "eager on many nodes": (0.89, 3.70),
}
"""Lower and upper end over the prediction, by kind of run."""


EAGER_OP_SECONDS = 5e-5
"""Seconds per operation above which a program counts as eager: it launches several kernels for an operation."""


MANY_NODES = 4
"""Nodes from which programs whose collectives wait for Python also wait for each other."""


def kind_of(workload: Workload, layout: Layout) -> Kind:
    """The group whose errors a run is expected to share: models with experts; programs that launch every kernel from Python; 8
    bits and fewer; the rest."""
    if workload.model.num_experts:
        return "experts"
    if workload.stack.overheads.op_seconds > EAGER_OP_SECONDS:
        nodes = layout.world_size / workload.cluster.node.num_accelerators
        return "eager on many nodes" if nodes >= MANY_NODES else "eager"
    return "fp8" if layout.precision in NARROW else "dense"


def interval(seconds: float, kind: Kind, *, fastest: float, slowest: float) -> tuple[float, float]:
    """Lower and upper end of a predicted step time; `fastest` and `slowest` are those of all layouts the row may mean."""
    low, high = FACTORS[kind]
    return min(seconds, fastest) * low, max(seconds, slowest) * high


FULL, SPREAD = 0.93, 0.10
"""Share of the device that a layout is predicted to need where half of such runs end out of memory, and the standard deviation
of its logarithm: 1,544 runs and failures of two whole scans (the playbook's, Aleph Alpha's), by predicted share. Of those with
0.82 to 0.86 18 percent failed (15 by this), 0.90 to 0.95 52 (48), 0.95 to 1.00 67 (68), 1.00 to 1.05 84 (83)."""


FULL_REPLAYED, SPREAD_REPLAYED = 0.97, 0.06
"""Share and standard deviation for our trainer, every tensor of which is replayed: what may differ is the allocator's cache and
what NCCL and CUDA take. An assumption: no scan of it exists. Allocators' peaks of programs whose source was read are met to
half a percent in the median (docs/validation.md)."""


def out_of_memory_risk(needed_bytes: float, capacity_bytes: float, *, is_replayed: bool = False) -> float:
    """Chance, to a millionth, that a run which is predicted to need so much of a device ends out of memory. `is_replayed`: it
    is our trainer's, all of whose tensors are known."""
    if needed_bytes <= 0:
        return 0.0
    full, spread = (FULL_REPLAYED, SPREAD_REPLAYED) if is_replayed else (FULL, SPREAD)
    return round(0.5 * erfc(-log(needed_bytes / capacity_bytes / full) / spread / sqrt(2)), 6)
