"""Memory of one priced layout from the replay of its step (`plan.memory.replay`), instead of the column formulas.

`plan.columns.footprint` computes memory for whole tables of layouts, to filter a search. The memory that is printed for a
layout, for any trainer, comes from the replay of its schedule's actions on the fullest pipeline rank, plus the allocator's
share from `plan.columns.footprint`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.replay import MemoryPlan, plan_fullest_rank
from ultrascale.plan.time.price import Prediction
from ultrascale.schedules.build import is_file

CATEGORIES = {
    "weights": ("parameters",), "gathered": ("gathered",), "gradients": ("gradients",), "optimizer": ("optimizer",),
    "activations": ("activations", "temporary"), "buffers": ("communication", "other"),
}  # fmt: skip
"""Categories of `plan.columns.footprint`, each with the categories of `plan.memory.ledger` that it sums."""


def with_replay(prediction: Prediction) -> Prediction:
    """`prediction` with its memory from the replay."""
    workload, layout, columns = prediction.workload, prediction.layout, prediction.memory
    known = _replayed.__wrapped__ if is_file(layout.schedule) else _replayed  # a file may change
    plan = known(workload.model, layout, workload.sequence_length, workload.sequences_per_batch, workload.documents,
                 workload.stack, workload.expert_imbalance)  # fmt: skip
    memory = replace(columns.replayed(plan.peak.total), categories=categories_of(plan))
    return replace(prediction, memory=memory, replay=plan)


@lru_cache(maxsize=4096)
def _replayed(
    model: Model, layout: Layout, length: int, sequences: int, documents: bool, stack: Stack, expert_imbalance: float
) -> MemoryPlan:
    return plan_fullest_rank(
        model, layout, sequence_length=length, sequences_per_batch=sequences, documents=documents, optimizer=stack.optimizer,
        stack=stack, expert_imbalance=expert_imbalance,
    )  # fmt: skip


def categories_of(plan: MemoryPlan) -> dict[str, float]:
    """Bytes at the peak by category of `plan.columns.footprint`."""
    by_category = plan.peak.by_category
    return {name: float(sum(by_category[part] for part in parts)) for name, parts in CATEGORIES.items()}
