"""Why a rank runs out of memory: the storages alive at the peak, and changes of the layout with their planned effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ultrascale.catalogue.cluster import Cluster
from ultrascale.config.rules.run_rules import run_problems
from ultrascale.config.rules.trainable import untrainable_layout
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.recomputed import is_modules
from ultrascale.description.run import Run
from ultrascale.plan.report import DEFAULT_OPTIMIZER, RunPlan, plan_run
from ultrascale.trace.recording.record import RankTrace

PARTS, EDITS = 8, 3
MOST_TOGETHER = 3
"""Largest number of changes that are combined if fewer do not suffice."""
PIECES = 4
"""Chunks of feed-forward layers to propose: four save most of what more would (docs/memory-for-speed.md)."""
LEAST_SAVED = 0.01
"""Least saving worth reporting, as a fraction of the needed memory."""
GO_ON_FROM = 4
"""Number of best changes that are combined further; combining all would take a hundred plans."""


class Part(NamedTuple):
    """Storages of one sort that live at the peak."""

    category: str
    what: str
    line: str
    count: int
    num_bytes: int


class Edit(NamedTuple):
    """A change of the layout, with its planned effect."""

    setting: str
    needed_bytes: int
    saved_bytes: int
    fits: bool
    slower: float | None
    """Slowdown as a fraction of the step's time; None where no rates are known."""
    at_once: int = 1
    """Number of single changes it is made of."""

    @property
    def helps(self) -> bool:
        """True if it saves at least `LEAST_SAVED`."""
        return self.saved_bytes > LEAST_SAVED * self.needed_bytes


def biggest_parts(trace: RankTrace, index: int, *, most: int = PARTS) -> list[Part]:
    """Largest parts alive after change `index`, grouped by category, operation and line."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for block, num_bytes in trace.alive_at(index):
        is_named = "." in block.what
        key = (block.category, _weight_of(block.what) if is_named else block.what, "" if is_named else block.line)
        counts[key] += 1
        sizes[key] += num_bytes
    return [Part(*key, counts[key], size) for key, size in sizes.most_common(most)]


def edits(run: Run, cluster: Cluster, *, most: int = EDITS) -> list[Edit]:
    """Changes that help: first those that make the run fit, the fastest first; then those that save most.

    If no single change makes it fit, the best combination of two or three that does comes first, as one entry.
    """
    now, priced = plan_run(run, cluster), PlanCache(run, cluster)
    singles = [edit for change in _changes(run.layout, run) if (edit := priced.edit((change,), now)) and edit.saved_bytes > 0]
    singles = [edit for edit in singles if edit.helps] or singles
    first: list[Edit] = []
    if not any(edit.fits for edit in singles) and not now.fits:
        first = _combinations(run, priced, now)
    return [*first, *_ranked(singles)][:most]


def _combinations(run: Run, priced: PlanCache, now: RunPlan) -> list[Edit]:
    """Fastest combination of two, else three changes that makes the run fit; else the combination that saves most."""
    tried: list[Edit] = []
    chains: list[tuple[FlagChange, ...]] = [(change,) for change in _changes(run.layout, run)]
    for _ in range(2, MOST_TOGETHER + 1):
        chains = [
            (*chain, change)
            for chain in _most_saving(chains, priced, now)
            for change in _changes(chain[-1].layout, replace(run, layout=chain[-1].layout))
        ]
        more = [edit for chain in chains if (edit := priced.edit(chain, now))]
        tried += more
        if any(edit.fits for edit in more):
            break
    return _ranked(tried)[:1]


def _most_saving(chains: list[tuple[FlagChange, ...]], priced: PlanCache, now: RunPlan) -> list[tuple[FlagChange, ...]]:
    """Combinations to extend by another change: those that save most."""
    saved = [(edit.saved_bytes, number) for number, chain in enumerate(chains) if (edit := priced.edit(chain, now))]
    return [chains[number] for _, number in sorted(saved, reverse=True)[:GO_ON_FROM]]


def _ranked(candidates: list[Edit]) -> list[Edit]:
    return sorted(candidates, key=lambda edit: (not edit.fits, (edit.slower or 0.0) if edit.fits else -edit.saved_bytes))


class FlagChange(NamedTuple):
    """Command-line flags, and the layout that they produce."""

    setting: dict[str, Any]
    layout: Layout


class PlanCache:
    """Cache of plans of changed layouts."""

    def __init__(self, run: Run, cluster: Cluster):
        self.run, self.cluster = run, cluster
        self._known: dict[Layout, RunPlan | None] = {}

    def edit(self, chain: tuple[FlagChange, ...], now: RunPlan) -> Edit | None:
        """Effect of a combination of changes; None if it cannot be planned or trained."""
        plan = self._plan(chain[-1].layout)
        if plan is None:
            return None
        settings: dict[str, Any] = {}
        for change in chain:
            settings |= change.setting
        words = " ".join(
            f"--layout.{name.replace('_', '-')} {'true' if value is True else value}" for name, value in settings.items()
        )
        return Edit(words, plan.needed_bytes, now.needed_bytes - plan.needed_bytes, plan.fits, _slower(plan, now), len(chain))

    def _plan(self, layout: Layout) -> RunPlan | None:
        if layout not in self._known:
            self._known[layout] = None
            run = replace(self.run, layout=layout)
            with suppress(SpecError):
                if not (run_problems(run) or untrainable_layout(layout)):
                    self._known[layout] = plan_run(run, self.cluster)
        return self._known[layout]


def _changes(layout: Layout, run: Run) -> Iterator[FlagChange]:
    """Single changes that keep the number of ranks."""

    def changed(**settings: Any) -> FlagChange:
        return FlagChange(settings, replace(layout, **settings))

    ways = ["none", "selective", "every-k", "full"]
    current = ways.index(layout.recompute) if layout.recompute in ways else int(is_modules(layout.recompute))
    for way in ("selective", "full"):
        if ways.index(way) > current:
            yield changed(recompute=way)
    if layout.recompute in ways[:-1]:
        yield changed(recompute="auto")
    if not layout.offload_optimizer and run.optimizer.name == DEFAULT_OPTIMIZER:
        yield changed(offload_optimizer=True)
    if not layout.offload_activations:
        yield changed(offload_activations=True)
    if layout.mlp_chunks == 1 and not run.model.num_experts:
        yield changed(mlp_chunks=PIECES)
    for stage in range(layout.zero_stage + 1, 4):
        if layout.dp * layout.cp > 1:
            yield changed(zero_stage=stage)
    if layout.micro_batch_size > 1 and layout.micro_batch_size % 2 == 0:
        yield changed(micro_batch_size=layout.micro_batch_size // 2)
    if layout.dp_shard not in (None, layout.dp):
        yield changed(dp_shard=layout.dp)
    if layout.dp % 2 == 0 and layout.layers_per_stage is None:
        changes: dict[str, Any] = {"dp": layout.dp // 2}
        if layout.dp_shard is not None:
            changes["dp_shard"] = min(layout.dp_shard, layout.dp // 2)
        for axis in ("tp", "cp", "pp"):
            if layout.world_size % (layout.ep * layout.expert_tp) == 0:
                yield changed(**{axis: getattr(layout, axis) * 2}, **changes)
        if run.model.num_experts and run.model.num_experts % (layout.ep * 2) == 0:
            yield changed(ep=layout.ep * 2)


def _slower(changed: RunPlan, now: RunPlan) -> float | None:
    if changed.prediction is None or now.prediction is None:
        return None
    return changed.prediction.step_seconds / now.prediction.step_seconds - 1


def _weight_of(name: str) -> str:
    """A parameter's name without the number of its block."""
    parts = name.split(".")
    return ".".join(["layers", "*", *parts[2:]]) if parts[0] == "layers" and len(parts) > 2 else name
