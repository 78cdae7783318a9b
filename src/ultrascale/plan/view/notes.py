"""Notes that a reader of a plan should not miss, one sentence each: little headroom, and a default that costs time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ultrascale.catalogue.stacks.stack import with_attention
from ultrascale.description.units import format_bytes, format_seconds
from ultrascale.plan.report import RunPlan

if TYPE_CHECKING:
    from ultrascale.plan.search.search import SearchResult
    from ultrascale.plan.workload import Workload

TIGHT_BYTES = 2 * 2**30
"""Headroom below which a run may still run out of memory: the allocator fragments."""
COSTLY = 0.02
"""Fraction of the step from which what it costs is mentioned."""


def notes(plan: RunPlan, result: SearchResult | None = None) -> list[str]:
    """The notes; empty if there is nothing to report. `result`: the search that chose the plan."""
    advice = _packaged(plan, result)
    return [*warnings(plan, result), *([advice] if advice else [])]


def warnings(plan: RunPlan, result: SearchResult | None = None) -> list[str]:
    """The notes without advice to install anything."""
    return [note for note in (_tight(plan), _masked(plan, result)) if note]


def unmasked_seconds(plan: RunPlan, result: SearchResult | None = None) -> float | None:
    """Seconds of a step without document masks: of the fastest layout that a search finds then, else of the same layout.

    None for plans without masks.
    """
    if plan.prediction is None or not plan.run.data.document_mask:
        return None
    return _otherwise(plan, result, replace(plan.prediction.workload, documents=False))


def packaged_seconds(plan: RunPlan, result: SearchResult | None) -> tuple[str, float] | None:
    """FlashAttention's package for the device, and the seconds of a step with it, likewise.

    None if torch's kernel is as fast, if the run names a kernel, or if it cannot use the package.
    """
    if plan.prediction is None or plan.prediction.workload.stack.attention_kernel != "contest":
        return None
    from ultrascale.description.attention_cores import core_requirements, unsupported_reason
    from ultrascale.plan.time.attention_choice import package_of

    now = plan.prediction.workload
    package = package_of(now.cluster.accelerator)
    if package is None or unsupported_reason(package, core_requirements(plan.run, "cuda")):
        return None
    return package, _otherwise(plan, result, replace(now, stack=with_attention(now.stack, package)))


def _otherwise(plan: RunPlan, result: SearchResult | None, other: Workload) -> float:
    from ultrascale.plan.search.explain import seconds_otherwise  # here: plans for CPUs do without
    from ultrascale.plan.time.price import predict

    if result is None or result.best is None:
        return predict(other, plan.run.layout).step_seconds
    return seconds_otherwise(result, other)


def _tight(plan: RunPlan) -> str:
    if plan.prediction is None or not 0 <= plan.headroom_bytes < TIGHT_BYTES:
        return ""
    less = f"less than {format_bytes(TIGHT_BYTES)}"
    return f"warning: {format_bytes(plan.headroom_bytes)} of headroom, {less}: the run may still run out of memory"


def _masked(plan: RunPlan, result: SearchResult | None) -> str:
    seconds = unmasked_seconds(plan, result) if plan.fits else None
    if seconds is None or (saved := _saved(plan, seconds)) < COSTLY:
        return ""
    without = f"{format_seconds(seconds)} with --data.document-mask false"
    return f"intra-document masking costs {saved:.0%} of the step here: {without}"


def _packaged(plan: RunPlan, result: SearchResult | None) -> str:
    if not plan.fits or (package := packaged_seconds(plan, result)) is None or (saved := _saved(plan, package[1])) < COSTLY:
        return ""
    name, seconds = package
    with_it = f"{format_seconds(seconds)} with --layout.attention {name}"
    return f"the package {name}, if installed, saves {saved:.0%} of the step here: {with_it}"


def _saved(plan: RunPlan, seconds: float) -> float:
    assert plan.prediction is not None
    return 1 - seconds / plan.prediction.step_seconds
