"""Uncertainty of a prediction: the risk of running out of memory, and prediction intervals of a step time.

Intervals come from errors on sources that were left out of the fit, and on runs that took part in none
(`benchmarks/plan/collected_runs.csv`).

Split conformal prediction by groups (Vovk et al. 2005, chapter 4): every row is predicted with constants fitted without its
source, and the interval runs between two quantiles of the ratios measured / predicted, a source of n rows weighing sqrt(n). The
quantile level is the lowest whose intervals, computed without a source, contain `COVERAGE` of that source's rows on average.
Each group (`kind_of`), known before a run, has its own width. The factors are copied from the output of
`benchmarks/plan/cross_validate.py`.
"""

from __future__ import annotations

from math import erfc, log, sqrt
from typing import Literal

from ultrascale.description.layout import NARROW, Layout
from ultrascale.plan.workload import Workload

COVERAGE = 0.8
"""Fraction of runs that an interval should contain."""
Kind = Literal["dense", "fp8", "experts", "eager", "eager on many nodes"]
FACTORS: dict[Kind, tuple[float, float]] = {
    "dense": (0.89, 1.31),
    "fp8": (0.91, 1.29),
    "experts": (0.79, 1.54),
    "eager": (0.82, 1.75),
    "eager on many nodes": (0.89, 3.70),
}
"""Ratios of the lower and upper end to the prediction, by kind of run."""


EAGER_OP_SECONDS = 5e-5
"""Host seconds per operation above which a program counts as eager (it launches several kernels per operation)."""


MANY_NODES = 4
"""Nodes from which programs whose collectives wait for Python also wait for each other."""


def kind_of(workload: Workload, layout: Layout) -> Kind:
    """Group whose prediction errors a run should share: models with experts; programs that launch every kernel from Python; 8
    bits and fewer; all others."""
    if workload.model.num_experts:
        return "experts"
    if workload.stack.overheads.op_seconds > EAGER_OP_SECONDS:
        nodes = layout.world_size / workload.cluster.node.num_accelerators
        return "eager on many nodes" if nodes >= MANY_NODES else "eager"
    return "fp8" if layout.precision in NARROW else "dense"


def interval(seconds: float, kind: Kind, *, fastest: float, slowest: float) -> tuple[float, float]:
    """Lower and upper end of a predicted step time. `fastest`, `slowest`: over all layouts that the row may refer to."""
    low, high = FACTORS[kind]
    return min(seconds, fastest) * low, max(seconds, slowest) * high


FULL, SPREAD = 0.93, 0.10
"""Predicted fraction of device memory at which half of the runs fail out of memory, and the standard deviation of its
logarithm: from 1,544 runs and failures of two whole scans (the playbook's, Aleph Alpha's). Failures by predicted fraction, with
this law's value in brackets: 0.82 to 0.86 18 percent (15), 0.90 to 0.95 52 (48), 0.95 to 1.00 67 (68), 1.00 to 1.05 84 (83)."""


FULL_REPLAYED, SPREAD_REPLAYED = 0.97, 0.06
"""`FULL` and `SPREAD` for our trainer, whose tensors are all replayed: only the allocator's cache and the memory of NCCL and
CUDA are uncertain. Assumed: no scan of it exists. The median error of allocator peaks of programs whose source was read is half
a percent (docs/validation.md)."""


def out_of_memory_risk(needed_bytes: float, capacity_bytes: float, *, is_replayed: bool) -> float:
    """Probability, rounded to 1e-6, that a run fails out of memory. `is_replayed`: all of its tensors are replayed (our
    trainer)."""
    share = needed_bytes / capacity_bytes
    if share <= 0:  # nothing is needed, or memory is unlimited
        return 0.0
    full, spread = (FULL_REPLAYED, SPREAD_REPLAYED) if is_replayed else (FULL, SPREAD)
    return round(0.5 * erfc(-log(share / full) / spread / sqrt(2)), 6)
