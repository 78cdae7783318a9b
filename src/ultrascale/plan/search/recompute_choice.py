"""recompute = "auto": what each block computes again, so that a step is as fast as it can be in the memory there is.

    a block     its ways (none, selective, selective+mlp, ..., full), each with the bytes it keeps and the seconds it adds
    a rank      a way for each of its blocks: of all that keep no more than so many bytes, the one that adds least
    memory      the fastest of these whose peak, replayed, fits

Bytes of a way are `plan.columns.block_memory`'s, seconds those of `plan.time.recompute_prices`. The best ways of n blocks are
made from those of n - 1, all that another beats in both left out (Nemhauser and Ullmann 1969): exact, where going by bytes per
second one operation after the other leaves what the last block does not fill. Every rank of a pipeline has its own, for the
first keeps most micro-batches; all ranks of a stage have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.memory.replay import num_micro_batches, plan_memory, rank_shape, stage_parts
from ultrascale.plan.pipeline.pipeline_activations import rank_in_flight
from ultrascale.plan.report import RunPlan, device_of, has_rates, live_room, plan_run, workload_of
from ultrascale.plan.time.recompute_prices import forward_seconds
from ultrascale.plan.workload import Workload
from ultrascale.schedules.actions import Kind
from ultrascale.schedules.build import build_schedule
from ultrascale.work.ops import Op, Shape
from ultrascale.work.recompute import recompute_of_mode, recomputed_ops, regions
from ultrascale.work.recompute import reruns_last as reruns_last_of
from ultrascale.work.sharding.places import Coordinates
from ultrascale.work.work import block_work

PLAIN = ("none", "selective", "full")
"""Ways that a compiled block supports: the compiler sees operations, and not where in the block they are."""
CONTAINED = (
    ("mlp", "mlp_act"), ("shared_experts", "mlp_act"), ("moe", "mlp_act"), ("moe", "moe_act"), ("moe", "moe_permute"),
    ("moe", "shared_experts"),
)  # fmt: skip
"""Modules of which the first makes again what the second does."""
CPU_FLOPS_PER_SECOND = 44e9
CPU_BYTES_PER_SECOND = 10e9
"""Bytes per second of one core, and FLOPs per second in fp32, where the catalogue has no rates. Only their ratio matters
(docs/speed.md)."""
MOST_STATES = 1 << 15
"""States kept among the best ways of a rank's blocks; of more every second is left out, which costs at most a block's
smallest step."""


@dataclass(frozen=True)
class RecomputeOption:
    """One way to recompute a block."""

    mode: str
    kept_bytes: int
    """Bytes of one micro-batch held from the forward to the backward pass."""
    seconds: float
    """Seconds that recomputation adds to one micro-batch."""


@dataclass(frozen=True)
class RecomputeChoice:
    """A way for each block of a pipeline's rank."""

    modes: tuple[str, ...]
    kept_bytes: int
    """Bytes of all micro-batches in flight."""
    seconds: float
    """Added to one micro-batch."""


def recompute_options(
    workload: Workload, layer: int, shape: Shape, *, compiled: bool = False, splits: bool = False
) -> list[RecomputeOption]:
    """The ways of block `layer` that no other beats in bytes and seconds, from the fastest to the smallest.

    `compiled`: blocks are compiled. `splits`: the pipeline's schedule cuts backward passes in two.
    """
    model, ops = workload.model, block_work(workload.model, layer, shape)
    behind = reruns_last_of(ops, tp=shape.tp, splits=splits)
    prices = {op.name: _seconds(workload, shape, op) for op in ops}
    candidates = []
    for mode in PLAIN if compiled else (*PLAIN, *_mixed(ops, shape)):
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
    """Every choice for a rank's blocks that no other beats, from the fastest to the smallest."""

    blocks: Sequence[Sequence[RecomputeOption]]
    weights: Sequence[int]
    kept_bytes: NDArray[np.int64]
    """Falling."""
    seconds: NDArray[np.float64]
    """Rising."""
    steps: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]
    """By block: which choice for those before it, and which of its ways."""

    def at(self, index: int) -> RecomputeChoice:
        """One of them."""
        modes: list[str] = []
        where = index
        for options, (before, which) in zip(reversed(self.blocks), reversed(self.steps), strict=True):
            modes.append(options[which[where]].mode)
            where = int(before[where])
        return RecomputeChoice(self._in_order(modes[::-1]), int(self.kept_bytes[index]), float(self.seconds[index]))

    def _in_order(self, modes: list[str]) -> tuple[str, ...]:
        """`modes` with those of like blocks sorted, which changes no sum: blocks that recompute most come first, far from
        the peak at the end of the forward pass."""
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
    """The best choices for `blocks`, each of which keeps its bytes for so many micro-batches (`weights`)."""
    kept, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
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
    """`layout`, whose recompute is "auto", with the ways of its blocks.

    Within `layout.recompute_budget` bytes on every rank; and within memory if `fits` is given, which says of a layout whether
    rank `pp` of the pipeline can hold it. If nothing fits: everything is computed again.
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
    """`run` with the ways of its blocks, if its recompute is "auto": the fastest that fits `cluster`, or the budget it gives.

    Without a budget `plan_run` calls it fitting wherever it does so with one way for all blocks, and no such way that fits is
    faster. Raises SpecError if the budget is below what full recomputation keeps, or the batch does not suit the layout.
    """
    layout = run.layout
    if layout.recompute != "auto":
        return run
    workload = workload_of(run, cluster, stack, expert_imbalance=expert_imbalance)
    device, priced = device_of(cluster.accelerator), has_rates(cluster.accelerator, layout.precision)

    def planned(tried: Layout) -> RunPlan:
        return plan_run(replace(run, layout=tried), cluster, stack, expert_imbalance=expert_imbalance)

    def fits(tried: Layout, pp: int) -> bool:
        """As a plan judges its fullest rank (`plan.search.replayed`)."""
        peak = plan_memory(
            run.model, tried, sequence_length=workload.sequence_length, sequences_per_batch=workload.sequences_per_batch,
            documents=workload.documents, device=device, rank=pp * layout.world_size // layout.pp,
            optimizer=run.optimizer.name, stack=workload.stack, expert_imbalance=expert_imbalance,
        ).peak.total  # fmt: skip
        if not priced:
            return peak <= live_room(cluster.accelerator, tried, stack)
        return bool(stage_memory(workload, LayoutTable.of([tried])).row(0).replayed(peak).fits)

    if layout.recompute_budget is not None:
        return replace(run, layout=choose(workload, layout, compiled=run.compile, device=device))
    chosen = choose(workload, layout, fits=fits, compiled=run.compile, device=device)
    # Ranks choose one after the other, the smallest ways first tried by what they keep: one way for all may still be better.
    plain = (_with_modes(layout, [option] * workload.model.num_hidden_layers) for option in PLAIN)
    fitting = [plan for plan in map(planned, (chosen, *plain)) if plan.fits]
    best = min(fitting, key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0, default=None)
    return replace(run, layout=chosen if best is None else best.run.layout)


def _first_that_fits(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The lowest number from `low` to `high` that holds, `high` if none does. Bytes fall from each to the next, and peaks with
    them but for what a block at work needs, so that a search by halves finds it."""
    if low == high or holds(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _replaced_modes(modes: Sequence[str], layers: Sequence[int], chosen: Sequence[str]) -> list[str]:
    """`modes` with those of `layers` exchanged."""
    new_modes = dict(zip(layers, chosen, strict=True))
    return [new_modes.get(layer, mode) for layer, mode in enumerate(modes)]


def _with_modes(layout: Layout, modes: Sequence[str]) -> Layout:
    return replace(layout, recompute="blocks", recompute_budget=None, recompute_blocks=blocks_text(modes))


def _first_within_budget(choices: Frontier, layout: Layout, pp: int) -> int:
    """Number of the fastest choice that keeps to the budget."""
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
    """The blocks of a rank of the pipeline, of how many micro-batches each keeps at once, and whether W comes apart."""
    if layout.pp == 1:
        layers = list(range(workload.model.num_hidden_layers))
        return layers, [1] * len(layers), False
    rank = pp * layout.world_size // layout.pp
    coordinates, stage_cut = Coordinates.of(layout, rank), workload.stack.stage_cut
    parts = stage_parts(workload.model, layout, workload.sequence_length, coordinates, stage_cut)
    count = num_micro_batches(layout, workload.sequences_per_batch)
    actions = build_schedule(layout.schedule, layout.pp, count, layout.virtual_stages)[pp]
    flight = rank_in_flight(actions).by_stage
    splits = any(part.kind is Kind.INPUT_GRADIENT for action in actions for part in action.parts)
    pairs = [(layer, flight[number]) for number, part in parts.items() for layer in part.layers]
    return [layer for layer, _ in pairs], [weight for _, weight in pairs], splits


def _kind(workload: Workload, layer: int) -> tuple[bool, int | None]:
    return workload.model.is_moe(layer), workload.model.window(layer)


def _mixed(ops: tuple[Op, ...], shape: Shape) -> list[str]:
    """Every set of the modules that a block has, and selective recomputation with every set of its kinds. A ring's attention is
    no single operation that could be kept or not."""
    kinds = [kind for kind in dict.fromkeys(op.recompute_kind for op in ops) if kind and (kind != "attention" or shape.cp == 1)]
    modules = [name for name in MODULES if regions(ops, {name})]
    sets = [frozenset(subset) for size in range(1, len(modules) + 1) for subset in combinations(modules, size)]
    named = [
        modules_name(subset) for subset in sets if not any(outer in subset and inner in subset for outer, inner in CONTAINED)
    ]
    return [*named, *(mode_name(subset) for size in range(1, len(kinds) + 1) for subset in combinations(kinds, size))]


def _seconds(workload: Workload, shape: Shape, op: Op) -> float:
    """Seconds of one operation's forward pass, with its messages."""
    if workload.cluster.accelerator.measured_at_run_time:
        flops = op.flops * (op.scores.share if op.scores is not None else 1.0)
        return flops / CPU_FLOPS_PER_SECOND + op.moved_bytes / CPU_BYTES_PER_SECOND
    return float(forward_seconds(workload, shape, (op,), CONSTANTS).sum())
