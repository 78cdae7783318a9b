"""How far a predicted step time may be off: intervals from the errors on sources that took no part in the fit.

Split conformal prediction by groups (Vovk et al. 2005, chapter 4): the ratios measured / predicted of all rows, each predicted
with constants fitted without its source, are sorted, and the interval runs between two of their quantiles, a source of n rows
weighing sqrt(n). The level of the quantiles is the lowest whose intervals, found without a source, hold `COVERAGE` of that
source's rows on average. What is wide and what is narrow is told by groups that a row shows before it is run: `kind_of`. The
factors are set from what `benchmarks/plan/cross_validate.py` prints.
"""

from __future__ import annotations

from typing import Literal

from ultrascale.plan.measured_rows import Asked
from ultrascale.plan.workload import Workload

COVERAGE = 0.8
"""Share of runs that an interval is meant to hold."""
Kind = Literal["dense", "fp8", "experts", "scan"]
FACTORS: dict[Kind, tuple[float, float]] = {
    "dense": (0.89, 1.42),
    "fp8": (0.87, 1.28),
    "experts": (0.74, 1.32),
    "scan": (0.89, 3.70),
}
"""Lower and upper end over the prediction, by kind of run."""


def kind_of(asked: Asked, workload: Workload) -> Kind:
    """The group whose errors a run is expected to share.

    scan: an automatic scan of layouts, good and bad ones on whatever nodes were free, as the playbook's; experts; fp8; dense.
    """
    if asked.is_playbook:
        return "scan"
    if workload.model.num_experts:
        return "experts"
    return "fp8" if "8" in asked.precision or "4" in asked.precision else "dense"


def interval(seconds: float, kind: Kind, *, fastest: float, slowest: float) -> tuple[float, float]:
    """Lower and upper end of a predicted step time; `fastest` and `slowest` are those of all layouts the row may mean."""
    low, high = FACTORS[kind]
    return min(seconds, fastest) * low, max(seconds, slowest) * high
