"""recompute = "auto": chooses activation recomputation for each block, for the fastest step that fits in memory.

    a block     its options (none, selective, selective+mlp, ..., full), with the bytes that each keeps and the seconds it adds
    a rank      one option for each of its blocks: the least added time for any number of kept bytes
    memory      the fastest of these choices whose replayed peak fits

Bytes of an option come from `plan.columns.block_memory`, seconds from `plan.time.recompute_prices`. The Pareto front of n
blocks is built from that of n - 1, dropping dominated choices (Nemhauser and Ullmann 1969). This is exact; a greedy choice by
bytes per second would leave memory unused. Pipeline ranks differ, because the first keeps most micro-batches in flight; all
ranks of a stage have the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from ultrascale.catalogue.cluster import Cluster
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.description.recomputed import MODULES, blocks_text, mode_name, modules_name
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes
from ultrascale.plan.columns.block_memory import block_memory
from ultrascale.plan.columns.footprint import stage_memory
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.layouts import PLAIN_RECOMPUTE, Column, Floats, Indices, LayoutTable
from ultrascale.plan.memory.replay import num_micro_batches, plan_memory, rank_shape, stage_parts
from ultrascale.plan.pipeline.pipeline_activations import rank_in_flight
from ultrascale.plan.report import RunPlan, device_of, has_rates, live_room, plan_run, workload_of
from ultrascale.plan.time.recompute_prices import forward_seconds
from ultrascale.plan.workload import Workload
from ultrascale.schedules.actions import splits_backward
from ultrascale.schedules.build import build_schedule
from ultrascale.work.ops import Op, Shape
from ultrascale.work.recompute import recompute_of_mode, recomputed_ops, regions
from ultrascale.work.recompute import reruns_last as reruns_last_of
from ultrascale.work.sharding.places import Coordinates
from ultrascale.work.work import block_work

CONTAINED = (
    ("mlp", "mlp_act"), ("shared_experts", "mlp_act"), ("moe", "mlp_act"), ("moe", "moe_act"), ("moe", "moe_permute"),
    ("moe", "shared_experts"),
)  # fmt: skip
"""Pairs of modules: recomputing the first includes the second."""
CPU_FLOPS_PER_SECOND = 44e9
CPU_BYTES_PER_SECOND = 10e9
"""Rates of one CPU core, for which the catalogue has none: bytes per second, and fp32 FLOPs per second (next line). Only their
ratio matters (docs/speed.md)."""
MOST_STATES = 1 << 15
"""Maximum number of choices on a rank's Pareto front; above it every second one is dropped, which costs at most a block's
smallest step."""


@dataclass(frozen=True)
class RecomputeOption:
    """One recomputation option of a block."""

    mode: str
    kept_bytes: int
    """Bytes of one micro-batch held from the forward to the backward pass."""
    seconds: float
    """Seconds that recomputation adds to one micro-batch."""


@dataclass(frozen=True)
class RecomputeChoice:
    """An option for each block of a pipeline rank."""

    modes: tuple[str, ...]
    kept_bytes: int
    """Bytes of all micro-batches in flight."""
    seconds: float
    """Seconds that recomputation adds to one micro-batch."""


def recompute_options(
    workload: Workload, layer: int, shape: Shape, *, compiled: bool = False, splits: bool = False
) -> list[RecomputeOption]:
    """Options of block `layer` on the Pareto front of bytes and seconds, from the fastest to the smallest.

    `compiled`: only plain modes are options, as a compiler sees operations, not their place in the block.
    `splits`: the pipeline schedule splits backward passes into I and W.
    """
    model, ops = workload.model, block_work(workload.model, layer, shape)
    behind = reruns_last_of(ops, tp=shape.tp, splits=splits)
    prices = {op.name: _seconds(workload, shape, op) for op in ops}
    candidates = []
    for mode in PLAIN_RECOMPUTE if compiled else (*PLAIN_RECOMPUTE, *_mixed(ops, shape)):
        recomputation = recompute_of_mode(mode, model, layer, shape, workload.stack)
        seconds = sum(prices[op.name] for op in recomputed_ops(recomputation, ops, reruns_last=behind))
        candidates.append(
            RecomputeOption(mode, block_memory(model, layer, shape, recompute=mode, stack=workload.stack).saved_bytes, seconds)
        )
    candidates.sort(key=lambda option: (option.seconds, option.kept_bytes))
    return [
        option
        for index, option in enumerate(candidates)
        if all(option.kept_bytes < other.kept_bytes for other in candidates[:index])
    ]


@dataclass(frozen=True)
class Frontier:
    """Pareto front of the choices for a rank's blocks, from the fastest to the smallest."""

    blocks: Sequence[Sequence[RecomputeOption]]
    weights: Sequence[int]
    kept_bytes: Column
    """Descending."""
    seconds: Floats
    """Ascending."""
    steps: Sequence[tuple[Indices, Indices]]
    """For each block: index of the choice for the blocks before it, and of its own option."""

    def at(self, index: int) -> RecomputeChoice:
        """The choice at `index`."""
        modes: list[str] = []
        where = index
        for options, (before, which) in zip(reversed(self.blocks), reversed(self.steps), strict=True):
            modes.append(options[which[where]].mode)
            where = int(before[where])
        return RecomputeChoice(self._in_order(modes[::-1]), int(self.kept_bytes[index]), float(self.seconds[index]))

    def _in_order(self, modes: list[str]) -> tuple[str, ...]:
        """`modes` with those of equal blocks sorted, which changes no sum: blocks that recompute most come first, away from the
        peak at the end of the forward pass."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, (options, weight) in enumerate(zip(self.blocks, self.weights, strict=True)):
            places.setdefault((id(options), weight), []).append(place)
        reordered = list(modes)
        for same in places.values():
            seconds = {option.mode: option.seconds for option in self.blocks[same[0]]}
            ordered = sorted((modes[place] for place in same), key=lambda mode: -seconds[mode])
            for place, mode in zip(same, ordered, strict=True):
                reordered[place] = mode
        return tuple(reordered)


def frontier(blocks: Sequence[Sequence[RecomputeOption]], weights: Sequence[int]) -> Frontier:
    """Pareto front of the choices for `blocks`; `weights`: for how many micro-batches each block keeps its bytes."""
    kept, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[Indices, Indices]] = []
    for options, weight in zip(blocks, weights, strict=True):
        more = np.array([option.kept_bytes * weight for option in options], dtype=np.int64)
        every = (kept[:, None] + more).ravel(), (seconds[:, None] + np.array([option.seconds for option in options])).ravel()
        order = np.lexsort(every)  # by seconds, then by bytes
        lowest = np.minimum.accumulate(every[0][order])
        best = order[np.append(True, lowest[1:] < lowest[:-1])]
        while len(best) > MOST_STATES:
            best = np.append(best[:-1:2], best[-1])
        kept, seconds = every[0][best], every[1][best]
        steps.append((best // len(options), best % len(options)))
    return Frontier(blocks, weights, kept, seconds, steps)


def choose(
    workload: Workload, layout: Layout, *, fits: Callable[[Layout, int], bool] | None = None, compiled: bool = False,
    device: Literal["cpu", "cuda"] = "cuda",
) -> Layout:  # fmt: skip
    """`layout`, whose recompute is "auto", with an option chosen for each block.

    Keeps at most `layout.recompute_budget` bytes on every rank, and fits in memory if `fits` is given: `fits(layout, pp)` is
    True if pipeline rank `pp` can hold the layout. If nothing fits, every block is fully recomputed.
    Raises SpecError if the budget is below what full recomputation keeps.
    """
    modes = ["full"] * workload.model.num_hidden_layers
    for pp in range(layout.pp):
        layers, weights, splits = _blocks_of_rank(workload, layout, pp)
        if not layers:
            continue
        shape = replace(rank_shape(layout, workload.sequence_length, documents=workload.documents, device=device),
                        kernels=workload.stack.kernels, expert_imbalance=workload.expert_imbalance)  # fmt: skip
        options = {kind: recompute_options(workload, layer, shape, compiled=compiled, splits=splits)
                for kind, layer in {_kind(workload, layer): layer for layer in layers}.items()}  # fmt: skip
        choices = frontier([options[_kind(workload, layer)] for layer in layers], weights)

        def holds(index: int, modes=modes, layers=layers, choices=choices, pp=pp) -> bool:
            return fits is None or fits(_with_modes(layout, _replaced_modes(modes, layers, choices.at(index).modes)), pp)

        index = _first_that_fits(_first_within_budget(choices, layout, pp), len(choices.seconds) - 1, holds)
        modes = _replaced_modes(modes, layers, choices.at(index).modes)
    return _with_modes(layout, modes)


def with_recomputation(
    run: Run, cluster: Cluster, stack: Stack = STACKS["ultrascale"], *, expert_imbalance: float = 1.0
) -> Run:
    """`run` with recomputation chosen for each block if its recompute is "auto": the fastest within `cluster` or the budget.

    Without a budget, the result fits (by `plan_run`) wherever one option for all blocks fits, and no such uniform option that
    fits is faster.
    Raises SpecError if the budget is below what full recomputation keeps, or the batch does not suit the layout.
    """
    layout = run.layout
    if layout.recompute != "auto":
        return run
    workload = workload_of(run, cluster, stack, expert_imbalance=expert_imbalance)
    device, priced = device_of(cluster.accelerator), has_rates(cluster.accelerator, layout.precision)

    def planned(tried: Layout) -> RunPlan:
        return plan_run(replace(run, layout=tried), cluster, stack, expert_imbalance=expert_imbalance)

    def fits(tried: Layout, pp: int) -> bool:
        """True if pipeline rank `pp` fits, by the rule for a plan's fullest rank (`plan.search.replayed`)."""
        rank = pp * layout.world_size // layout.pp
        peak = plan_memory(layout=tried, device=device, rank=rank, **workload.replayed).peak.total
        if not priced:
            return peak <= live_room(cluster.accelerator, tried, stack)
        return bool(stage_memory(workload, LayoutTable.of([tried])).row(0).replayed(peak).fits)

    if layout.recompute_budget is not None:
        return replace(run, layout=choose(workload, layout, compiled=run.compile, device=device))
    chosen = choose(workload, layout, fits=fits, compiled=run.compile, device=device)
    # Ranks choose one after the other, so one option for all blocks may still be better.
    plain = (_with_modes(layout, [option] * workload.model.num_hidden_layers) for option in PLAIN_RECOMPUTE)
    fitting = [plan for plan in map(planned, (chosen, *plain)) if plan.fits]
    best = min(fitting, key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0, default=None)
    return replace(run, layout=chosen if best is None else best.run.layout)


def _first_that_fits(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Lowest number from `low` to `high` for which `holds` is True, or `high`; by bisection. Kept bytes descend, and so do
    peaks except for the temporary memory of a running block."""
    if low == high or holds(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _replaced_modes(modes: Sequence[str], layers: Sequence[int], chosen: Sequence[str]) -> list[str]:
    """`modes` with those of `layers` replaced by `chosen`."""
    new_modes = dict(zip(layers, chosen, strict=True))
    return [new_modes.get(layer, mode) for layer, mode in enumerate(modes)]


def _with_modes(layout: Layout, modes: Sequence[str]) -> Layout:
    return replace(layout, recompute="blocks", recompute_budget=None, recompute_blocks=blocks_text(modes))


def _first_within_budget(choices: Frontier, layout: Layout, pp: int) -> int:
    """Index of the fastest choice within the budget."""
    budget = layout.recompute_budget
    if budget is None:
        return 0
    least = int(choices.kept_bytes[-1])
    if least > budget:
        holder = f"rank {pp} of the pipeline" if layout.pp > 1 else "a rank"
        rule = f"is {format_bytes(budget)}, but {holder} keeps {format_bytes(least)} even if every block is computed again"
        raise mistake("layout.recompute_budget", rule, f"Give {least} or more, or a smaller micro_batch_size.")
    return int(np.argmax(choices.kept_bytes <= budget))


def _blocks_of_rank(workload: Workload, layout: Layout, pp: int) -> tuple[list[int], list[int], bool]:
    """Blocks of a pipeline rank, the number of micro-batches that each keeps at once, and True if W is a separate pass."""
    if layout.pp == 1:
        layers = list(range(workload.model.num_hidden_layers))
        return layers, [1] * len(layers), False
    rank = pp * layout.world_size // layout.pp
    coordinates, stage_cut = Coordinates.of(layout, rank), workload.stack.stage_cut
    parts = stage_parts(workload.model, layout, workload.sequence_length, coordinates, stage_cut)
    count = num_micro_batches(layout, workload.sequences_per_batch)
    actions = build_schedule(layout.schedule, layout.pp, count, layout.virtual_stages)[pp]
    flight = rank_in_flight(actions).by_stage
    pairs = [(layer, flight[number]) for number, part in parts.items() for layer in part.layers]
    return [layer for layer, _ in pairs], [weight for _, weight in pairs], splits_backward(actions)


def _kind(workload: Workload, layer: int) -> tuple[bool, int | None]:
    return workload.model.is_moe(layer), workload.model.window(layer)


def _mixed(ops: tuple[Op, ...], shape: Shape) -> list[str]:
    """Every set of a block's modules, and selective recomputation with every set of its kinds of operations. Ring attention is
    not a single operation that could be kept."""
    kinds = [kind for kind in dict.fromkeys(op.recompute_kind for op in ops) if kind and (kind != "attention" or shape.cp == 1)]
    modules = [name for name in MODULES if regions(ops, {name})]
    sets = [frozenset(subset) for size in range(1, len(modules) + 1) for subset in combinations(modules, size)]
    named = [
        modules_name(subset) for subset in sets if not any(outer in subset and inner in subset for outer, inner in CONTAINED)
    ]
    return [*named, *(mode_name(subset) for size in range(1, len(kinds) + 1) for subset in combinations(kinds, size))]


def _seconds(workload: Workload, shape: Shape, op: Op) -> float:
    """Seconds of one operation's forward pass, with its messages."""
    if workload.accelerator.measured_at_run_time:
        flops = op.flops * (op.scores.share if op.scores is not None else 1.0)
        return flops / CPU_FLOPS_PER_SECOND + op.moved_bytes / CPU_BYTES_PER_SECOND
    return float(forward_seconds(workload, shape, (op,), CONSTANTS).sum())
