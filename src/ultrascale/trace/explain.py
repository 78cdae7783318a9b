"""Why a rank runs out of memory: what is alive at the peak, and what the planner would change, with its effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ultrascale.plan.report import RunPlan, plan_run
from ultrascale.spec.cluster import Cluster
from ultrascale.spec.layout import Layout
from ultrascale.spec.problems import SpecError
from ultrascale.spec.run import Run
from ultrascale.trace.record import RankTrace

PARTS, EDITS = 8, 3


class Part(NamedTuple):
    """Storages of one sort that live at the peak."""

    category: str
    what: str
    line: str
    count: int
    num_bytes: int


class Edit(NamedTuple):
    """A change of the layout, and what the planner says of it."""

    setting: str
    needed_bytes: int
    saved_bytes: int
    fits: bool
    slower: float | None
    """Of the step's time, as a fraction; None where no rates are known."""


def biggest_parts(trace: RankTrace, index: int, *, most: int = PARTS) -> list[Part]:
    """What takes most after a change, storages of one category, operation and line together."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for block, num_bytes in trace.alive_at(index):
        is_named = "." in block.what
        key = (block.category, _weight_of(block.what) if is_named else block.what, "" if is_named else block.line)
        counts[key] += 1
        sizes[key] += num_bytes
    return [Part(*key, counts[key], size) for key, size in sizes.most_common(most)]


def edits(run: Run, cluster: Cluster, *, most: int = EDITS) -> list[Edit]:
    """The changes that help: those that make it fit first, the fastest of them before others; else those that save most."""
    now = plan_run(run, cluster)
    found = []
    for setting, layout in _changes(run.layout, run):
        with suppress(SpecError):
            changed = plan_run(replace(run, layout=layout), cluster)
            saved = now.needed_bytes - changed.needed_bytes
            if saved > 0:
                found.append(Edit(setting, changed.needed_bytes, saved, changed.fits, _slower(changed, now)))
    return sorted(found, key=lambda edit: (not edit.fits, (edit.slower or 0.0) if edit.fits else -edit.saved_bytes))[:most]


def _changes(layout: Layout, run: Run) -> Iterator[tuple[str, Layout]]:
    """Single changes that need the same number of ranks."""

    def changed(**settings: Any) -> tuple[str, Layout]:
        words = " ".join(f"--layout.{name.replace('_', '-')} {value}" for name, value in settings.items())
        return words, replace(layout, **settings)

    ways = ["none", "selective", "every-k", "full"]
    at = ways.index(layout.recompute) if layout.recompute in ways else 0
    for way in ("selective", "full"):
        if ways.index(way) > at:
            yield changed(recompute=way)
    for stage in range(layout.zero_stage + 1, 4):
        if layout.dp * layout.cp > 1:
            yield changed(zero_stage=stage)
    if layout.micro_batch_size > 1 and layout.micro_batch_size % 2 == 0:
        yield changed(micro_batch_size=layout.micro_batch_size // 2)
    if layout.dp_shard not in (None, layout.dp):
        yield changed(dp_shard=layout.dp)
    if layout.dp % 2 == 0 and layout.layers_per_stage is None:
        others: dict[str, Any] = {"dp": layout.dp // 2}
        if layout.dp_shard is not None:
            others["dp_shard"] = min(layout.dp_shard, layout.dp // 2)
        for axis in ("tp", "cp", "pp"):
            if layout.world_size % (layout.ep * layout.expert_tp) == 0:
                yield changed(**{axis: getattr(layout, axis) * 2}, **others)
        if run.model.num_experts and run.model.num_experts % (layout.ep * 2) == 0:
            yield changed(ep=layout.ep * 2)


def _slower(changed: RunPlan, now: RunPlan) -> float | None:
    if changed.prediction is None or now.prediction is None:
        return None
    return changed.prediction.step_seconds / now.prediction.step_seconds - 1


def _weight_of(name: str) -> str:
    """A parameter's name without the number of its block: all blocks have one."""
    parts = name.split(".")
    return ".".join(["layers", "*", *parts[2:]]) if parts[0] == "layers" and len(parts) > 2 else name
