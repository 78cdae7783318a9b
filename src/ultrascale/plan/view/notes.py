"""Notes that a reader of a plan should not miss, one sentence each: little headroom, and a default that costs time."""

from __future__ import annotations

from dataclasses import replace

from ultrascale.description.units import format_bytes
from ultrascale.plan.report import RunPlan

TIGHT_BYTES = 2 * 2**30
"""Headroom below which a run may still run out of memory: the allocator fragments."""
COSTLY = 0.02
"""Fraction of the step from which document masks are mentioned."""


def notes(plan: RunPlan) -> list[str]:
    """The notes; empty if there is nothing to report."""
    return [note for note in (_tight(plan), _masked(plan)) if note]


def mask_fraction(plan: RunPlan) -> float:
    """Fraction of the step that document masks (packed sequences) cost; 0 without them."""
    if plan.prediction is None or not plan.run.data.document_mask:
        return 0.0
    from ultrascale.plan.time.price import predict  # here: a CPU is planned without NumPy

    workload = replace(plan.prediction.workload, documents=False)
    return 1 - predict(workload, plan.run.layout).step_seconds / plan.prediction.step_seconds


def _tight(plan: RunPlan) -> str:
    if plan.prediction is None or not 0 <= plan.headroom_bytes < TIGHT_BYTES:
        return ""
    less = f"less than {format_bytes(TIGHT_BYTES)}"
    return f"warning: {format_bytes(plan.headroom_bytes)} of headroom, {less}: the run may still run out of memory"


def _masked(plan: RunPlan) -> str:
    share = mask_fraction(plan)
    if share < COSTLY:
        return ""
    return f"intra-document masking costs {share:.0%} of the step here; without it: --data.document-mask false"
