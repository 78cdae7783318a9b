"""Memory saved and time added by each way to recompute, for one layout of one model, today.

*Reducing Activation Recomputation* (Korthikanti et al. 2022) found for dense models that computing attention's core again saves
70 percent of what full recomputation saves for a few percent of its time. Fused attention took that core away, and experts
changed what is left; so the statement is made anew for the model at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ultrascale.description.layout import Layout
from ultrascale.description.units import format_bytes
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.kept import selective_words

Way = Literal["none", "selective", "full"]
WAYS: tuple[Way, ...] = ("none", "selective", "full")
WORTH = 0.01
"""Share of the peak below which saved memory counts as none."""
REDONE = {
    "modules": "",  # told of the model
    "elementwise": "norms, rotary, activation functions",
    "attention": "attention's core",
    "alternate-products": "every second product and what is element-wise",
    "wide-products": "all but attention's products",
}


@dataclass(frozen=True)
class Recomputation:
    """One way to recompute, beside none."""

    way: Way
    saved_bytes: float
    """Allocator peak less than without recomputation."""
    added_seconds: float
    """A step more than without."""
    step_seconds: float
    """Without."""
    peak_bytes: float
    """Without."""


def ways_to_recompute(workload: Workload, layout: Layout) -> list[Recomputation]:
    """Selective and full recomputation of `layout`, each beside none."""
    plain, *others = (predict(workload, replace(layout, recompute=way)) for way in WAYS)
    return [
        Recomputation(
            way,
            float(plain.memory.allocated - other.memory.allocated),
            other.step_seconds - plain.step_seconds,
            plain.step_seconds,
            float(plain.memory.allocated),
        )
        for way, other in zip(WAYS[1:], others, strict=True)
    ]


def recomputation_statement(workload: Workload, layout: Layout) -> str:
    """One sentence a way: what it does again, saves and costs."""
    redone = {"selective": REDONE[workload.stack.selective] or selective_words(workload.model, layout), "full": "whole blocks"}
    told = []
    for item in ways_to_recompute(workload, layout):
        worth = item.saved_bytes >= WORTH * item.peak_bytes
        memory = f"saves {format_bytes(round(item.saved_bytes))}" if worth else "saves next to nothing"
        told.append(f"{item.way} ({redone[item.way]} again) {memory} for {item.added_seconds / item.step_seconds:+.1%} time")
    return "recomputation here: " + "; ".join(told)
