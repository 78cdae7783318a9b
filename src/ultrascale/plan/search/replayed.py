"""Memory of one priced layout from the replay of its step, on every rank of the pipeline, instead of from columns.

`plan.columns.footprint` puts whole tables of layouts together from parts; it filters a search. What is printed of a layout that
our trainer runs is what `plan.memory.replay` finds when the schedule's own actions are played, with the share of
`plan.columns.footprint`.
"""

from __future__ import annotations

from dataclasses import replace

from ultrascale.plan.memory.replay import MemoryPlan, is_replayed, plan_fullest_rank
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.workload import Workload
from ultrascale.spec.layout import Layout
from ultrascale.spec.trainable import untrainable_layout, untrainable_model

CATEGORIES = {
    "weights": ("parameters",), "gathered": ("gathered",), "gradients": ("gradients",), "optimizer": ("optimizer",),
    "activations": ("activations", "temporary"), "buffers": ("communication", "other"),
}  # fmt: skip
"""Categories of `plan.columns.footprint`, and those of `plan.memory.ledger` in each."""


def is_ours(workload: Workload, layout: Layout) -> bool:
    """Whether our trainer runs `layout`, and the replay knows it."""
    if workload.stack.name != "ultrascale" or not is_replayed(workload.model, layout):
        return False
    return not (untrainable_model(workload.model) or untrainable_layout(layout))


def with_replay(prediction: Prediction) -> Prediction:
    """`prediction` with the memory of the replay; as it is where the layout is not replayed.

    Experts whose rows are uneven (`expert_imbalance`) are not replayed: there the larger of both holds.
    """
    workload, layout, columns = prediction.workload, prediction.layout, prediction.memory
    if not is_ours(workload, layout):
        return prediction
    plan = plan_fullest_rank(
        workload.model, layout, sequence_length=workload.sequence_length, sequences_per_batch=workload.sequences_per_batch,
        documents=workload.documents, optimizer=workload.stack.optimizer,
    )  # fmt: skip
    more = plan.peak.total - columns.allocated
    if workload.expert_imbalance > 1 and more < 0:
        return prediction
    memory = replace(
        columns, allocated=columns.allocated + more, reserved=columns.reserved + more, categories=_categories(plan)
    )
    return replace(prediction, memory=memory, replay=plan)


def _categories(plan: MemoryPlan) -> dict[str, float]:
    by_category = plan.peak.by_category
    return {name: float(sum(by_category[part] for part in parts)) for name, parts in CATEGORIES.items()}
