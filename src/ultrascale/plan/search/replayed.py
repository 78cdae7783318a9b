"""Memory of one priced layout from the replay of its step (`plan.memory.replay`), instead of the column formulas.

`plan.columns.footprint` computes memory for whole tables of layouts, to filter a search. The memory that is printed for a
layout, for any trainer, comes from the replay of its schedule's actions on the fullest pipeline rank, plus the allocator's
share from `plan.columns.footprint`.
"""

from __future__ import annotations

from dataclasses import replace

from ultrascale.plan.memory.replay import MemoryPlan, plan_fullest_rank
from ultrascale.plan.time.price import Prediction

CATEGORIES = {
    "weights": ("parameters",), "gathered": ("gathered",), "gradients": ("gradients",), "optimizer": ("optimizer",),
    "activations": ("activations", "temporary"), "buffers": ("communication", "other"),
}  # fmt: skip
"""Categories of `plan.columns.footprint`, each with the categories of `plan.memory.ledger` that it sums."""


def with_replay(prediction: Prediction) -> Prediction:
    """`prediction` with its memory from the replay."""
    plan = plan_fullest_rank(layout=prediction.layout, **prediction.workload.replayed)
    memory = replace(prediction.memory.replayed(plan.peak.total), categories=categories_of(plan))
    return replace(prediction, memory=memory, replay=plan)


def categories_of(plan: MemoryPlan) -> dict[str, float]:
    """Bytes at the peak by category of `plan.columns.footprint`."""
    by_category = plan.peak.by_category
    return {name: float(sum(by_category[part] for part in parts)) for name, parts in CATEGORIES.items()}
