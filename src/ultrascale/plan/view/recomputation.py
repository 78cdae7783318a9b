"""Memory saved and time added by each recomputation mode, for one layout of one model, with current kernels.

*Reducing Activation Recomputation* (Korthikanti et al. 2022) found for dense models that recomputing core attention saves 70
percent of what full recomputation saves, for a few percent of its time. Fused attention removed that core, and experts changed
the rest, so the statement is computed anew for each model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ultrascale.description.layout import Layout
from ultrascale.description.units import format_bytes
from ultrascale.plan.layouts import PLAIN_RECOMPUTE
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.recompute import selective_words

WORTH = 0.01
"""Fraction of the peak below which saved memory counts as none."""
REDONE = {
    "modules": "",  # depends on the model
    "elementwise": "norms, rotary, activation functions",
    "attention": "attention's core",
    "alternate-products": "every second product and what is element-wise",
    "wide-products": "all but attention's products",
}


@dataclass(frozen=True)
class RecomputeTradeoff:
    """One recomputation mode compared with none."""

    mode: str
    saved_bytes: float
    """Reduction of the allocator's peak."""
    added_seconds: float
    """Time added to a step."""
    step_seconds: float
    """Step time without recomputation."""
    peak_bytes: float
    """Peak without recomputation."""


def recompute_tradeoffs(workload: Workload, layout: Layout) -> list[RecomputeTradeoff]:
    """Selective and full recomputation of `layout`, each compared with none."""
    plain, *variants = (predict(workload, replace(layout, recompute=mode)) for mode in PLAIN_RECOMPUTE)
    return [
        RecomputeTradeoff(
            mode,
            float(plain.memory.allocated - variant.memory.allocated),
            variant.step_seconds - plain.step_seconds,
            plain.step_seconds,
            float(plain.memory.allocated),
        )
        for mode, variant in zip(PLAIN_RECOMPUTE[1:], variants, strict=True)
    ]


def recomputation_statement(workload: Workload, layout: Layout) -> str:
    """One sentence per mode: what it recomputes, saves and costs."""
    redone = {"selective": REDONE[workload.stack.selective] or selective_words(workload.model, layout), "full": "whole blocks"}
    clauses = []
    for item in recompute_tradeoffs(workload, layout):
        worth = item.saved_bytes >= WORTH * item.peak_bytes
        memory = f"saves {format_bytes(round(item.saved_bytes))}" if worth else "saves next to nothing"
        clauses.append(
            f"{item.mode} ({redone[item.mode]} again) {memory} for {item.added_seconds / item.step_seconds:+.1%} time"
        )
    return "recomputation here: " + "; ".join(clauses)
