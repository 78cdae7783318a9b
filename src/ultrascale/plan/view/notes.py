"""Notes that a reader of a plan should not miss, one sentence each: little headroom, and a default that costs time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ultrascale.catalogue.stacks.stack import with_attention
from ultrascale.description.units import format_bytes, format_seconds
from ultrascale.plan.report import RunPlan

if TYPE_CHECKING:
    from ultrascale.plan.search.search import SearchResult

TIGHT_BYTES = 2 * 2**30
"""Headroom below which a run may still run out of memory: the allocator fragments."""
COSTLY = 0.02
"""Fraction of the step from which document masks are mentioned."""


def notes(plan: RunPlan, result: SearchResult | None = None) -> list[str]:
    """The notes; empty if there is nothing to report. `result`: the search that chose the plan."""
    return [note for note in (_tight(plan), _masked(plan, result)) if note]


def unmasked_seconds(plan: RunPlan, result: SearchResult | None = None) -> dict[str, float]:
    """Seconds of a step with other attention, by the flag that sets it: without document masks, and with the package for this
    device. Of the same layout, or of the fastest that a search finds then. Empty for plans without masks."""
    if plan.prediction is None or not plan.run.data.document_mask:
        return {}
    from ultrascale.description.attention_cores import core_requirements, unsupported_reason
    from ultrascale.plan.search.explain import seconds_otherwise  # here: a CPU is planned without NumPy
    from ultrascale.plan.time.attention_choice import package_of
    from ultrascale.plan.time.price import predict

    now = plan.prediction.workload
    others = {"--data.document-mask false": replace(now, documents=False)}
    package = package_of(now.cluster.accelerator) if now.stack.attention_kernel == "contest" else None
    if package and not unsupported_reason(package, core_requirements(plan.run, "cuda")):
        others[f"--layout.attention {package}"] = replace(now, stack=with_attention(now.stack, package))
    searched = result is not None and result.best is not None
    return {
        flag: seconds_otherwise(result, other) if searched else predict(other, plan.run.layout).step_seconds
        for flag, other in others.items()
    }


def _tight(plan: RunPlan) -> str:
    if plan.prediction is None or not 0 <= plan.headroom_bytes < TIGHT_BYTES:
        return ""
    less = f"less than {format_bytes(TIGHT_BYTES)}"
    return f"warning: {format_bytes(plan.headroom_bytes)} of headroom, {less}: the run may still run out of memory"


def _masked(plan: RunPlan, result: SearchResult | None) -> str:
    faster = {flag: seconds for flag, seconds in unmasked_seconds(plan, result).items() if _is_worth(plan, seconds)}
    if not faster:
        return ""
    ways = " or ".join(f"{format_seconds(seconds)} with {flag}" for flag, seconds in faster.items())
    return f"attention within documents costs {1 - min(faster.values()) / _seconds(plan):.0%} of the step here: {ways}"


def _is_worth(plan: RunPlan, seconds: float) -> bool:
    return seconds < (1 - COSTLY) * _seconds(plan)


def _seconds(plan: RunPlan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_seconds
