"""All legal layouts of N devices, as columns, and the refused ones with their reasons.

Two levels. A *mesh* divides the model and its work: (tp, cp, cp method, pp, virtual stages, schedule, ep, expert_tp), with dp
as the rest of N. Hundreds of meshes are enumerated in plain Python; refusals are counted by rule. On a mesh, (ZeRO stage, shard
size, micro-batch, recomputation) is a product of short lists, made once per (dp, kind of pipeline) and repeated in NumPy.

Not searched, because another layout is at least as fast in no more memory: tensor parallelism without sequence parallelism
(same traffic, more activations), AFAB (1F1B has the same bubble and holds fewer micro-batches), DualPipe (DualPipe-V holds
the weights once, for a bubble half a pass longer), and context parallelism with a micro-batch that has a common factor with
cp: m sequences over cp ranks are as many tokens per rank as m/2 over cp/2 with twice the dp, in as many micro-batches, with
less traffic (`tests/plan/test_search.py` prices both). Rings over groups of ranks that swap heads are searched if cp spans
nodes, with groups as large as the node and the heads allow: swaps wait for the network, rings do not. Requesting one of these
by name includes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from ultrascale.catalogue.stacks.stack_files import abilities
from ultrascale.config.rules.run_rules import MOST_MICRO_BATCHES, parallelism_problems
from ultrascale.description.layout import EMBEDDING_AND_HEAD, NARROW, Layout
from ultrascale.description.problems import Problem
from ultrascale.description.recomputed import is_modules, modules_name, modules_named
from ultrascale.description.schedules import SCHEDULES
from ultrascale.description.units import count_of, divisors, format_count
from ultrascale.plan.layouts import RECOMPUTE, Column, LayoutTable
from ultrascale.plan.time.stage_cut import cannot_run
from ultrascale.plan.workload import Workload

MIN_TOKENS_PER_CP_RANK = 512
"""Least tokens per cp rank: with fewer, compute cannot hide the exchange. An A100 needs 1,000 tokens on NVLink, 24 times as
many on InfiniBand (Liu et al. 2023, ring attention, table 2)."""
MIN_TOKENS_BESIDE_EXPERTS = 4096
"""Least tokens per cp rank of models with experts: fewer would make the space, large already through expert parallelism, three
times as large."""
MAX_TOKENS_PER_MICRO_BATCH = 2**17
"""Most tokens of one rank in one forward pass. GEMMs reach their best rate far below it."""
NAME_MODULES = ("modules", "attention")
"""Meanings of `selective` in stacks that recompute by named modules: ours and Megatron's."""
MANY_MICRO_BATCHES = "a rank"
"""Family of refused layouts in which the batch leaves a rank more micro-batches than the trainer goes through."""
Constraints = Mapping[str, Sequence[Any]]
"""Requested fields of `Layout`, with the values to search."""


class MeshShape(NamedTuple):
    """Degrees and choices that divide the model and its work."""

    tp: int
    sequence_parallel: bool
    cp: int
    cp_method: str
    cp_heads: int
    pp: int
    virtual_stages: int
    schedule: str
    dp: int
    ep: int
    expert_tp: int


@dataclass(frozen=True)
class Refusal:
    """A family of layouts that is not in the search."""

    family: str
    reason: str
    count: int
    """Number of refusals, among the ways to cut the model."""
    remedy: str = ""
    """The nearest that works, where a rule of the description names it."""


@dataclass(frozen=True)
class Space:
    """Layouts to search, and the refused families."""

    table: LayoutTable
    refused: tuple[Refusal, ...]


@dataclass
class _Rules:
    """Rules of a search: requested values and the trainer's abilities. Counts refusals."""

    workload: Workload
    base: Layout
    constraints: Constraints
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    remedies: dict[tuple[str, str], str] = field(default_factory=dict)
    judged: dict[Layout, list[Problem]] = field(default_factory=dict)
    """Problems of layouts that were judged: many ways to cut the model share a degree."""

    def __post_init__(self) -> None:
        self.model, self.stack = self.workload.model, self.workload.stack
        self.can = abilities(self.stack)

    @cached_property
    def named(self) -> str:
        return modules_of_constraints(self.workload, self.constraints)

    def choose(self, name: str, usual: Sequence[Any], able: Sequence[Any] | None = None) -> list[Any]:
        """Values of a field to search: the requested ones, else the usual ones; of `able`, if that is given: why others are
        left out is said by `plan.search.constraints`."""
        return [value for value in self.constraints.get(name, usual) if able is None or value in able]

    def allows(self, name: str, value: Any) -> bool:
        return name not in self.constraints or value in self.constraints[name]

    def refuse(self, family: str, reason: str, remedy: str = "") -> None:
        self.refused[family, reason] += 1
        self.remedies.setdefault((family, reason), remedy)  # the first is of the most data parallelism

    def breaks(self, family: str, layout: Layout) -> bool:
        """True if a layout breaks a rule of the description; records the rule as the reason."""
        if layout not in self.judged:
            length = self.workload.sequence_length
            self.judged[layout] = parallelism_problems(self.workload.model, layout, sequence_length=length)
        if problems := self.judged[layout]:
            self.refuse(family, problems[0].rule, problems[0].remedy)
        return bool(problems)


def legal_layouts(workload: Workload, *, base: Layout | None = None, constraints: Constraints | None = None) -> Space:
    """Every layout on all of the cluster's devices that `workload` and its stack allow.

    `base` gives the fields that are not searched (precision, buckets, offload); `constraints` holds searched fields to values.
    """
    rules = _Rules(workload, base or Layout(precision="bf16"), constraints or {})
    named = rules.named
    meshes = [] if named and rules.breaks(f"recompute {named}", Layout(recompute=named)) else list(_meshes(rules))
    by_inside: dict[tuple[int, str, int], list[MeshShape]] = {}
    for mesh in meshes:
        by_inside.setdefault((mesh.dp, mesh.schedule if mesh.pp > 1 else "", mesh.pp), []).append(mesh)
    tables = []
    for (dp, schedule, pp), members in by_inside.items():
        for share, cp in sorted({(mesh.tp * mesh.cp, mesh.cp) for mesh in members}):
            rows = _training_choices(rules, dp, schedule, pp, share, cp)
            same = [mesh for mesh in members if (mesh.tp * mesh.cp, mesh.cp) == (share, cp)]
            if len(rows) and same:
                tables.append(_product(same, rows, rules))
    table = LayoutTable.concatenate(tables) if tables else LayoutTable.of([])
    return Space(table, tuple(Refusal(*key, count, rules.remedies[key]) for key, count in rules.refused.most_common()))


def _meshes(rules: _Rules) -> Iterator[MeshShape]:
    gpus = rules.workload.cluster.num_accelerators
    for tp, sequence_parallel in _tensor(rules, gpus):
        for cp, method, heads in _context(rules, gpus // tp, Layout(tp=tp, sequence_parallel=sequence_parallel)):
            for pp, virtual_stages, schedule in _pipeline(rules, gpus // (tp * cp), cp):
                dp = gpus // (tp * cp * pp)
                if not rules.allows("dp", dp):
                    continue
                if (batch := rules.workload.sequences_per_batch) % dp:
                    rule = f"does not divide the batch of {count_of(batch, 'sequence')}"
                    rules.refuse(f"dp = {dp}", rule, nearest_batches(batch, dp))
                    continue
                for ep, expert_tp in _experts(rules, tp, tp * cp * dp):
                    yield MeshShape(tp, sequence_parallel, cp, method, heads, pp, virtual_stages, schedule, dp, ep, expert_tp)


def nearest_batches(batch: int, dp: int) -> str:
    """Remedy that names the nearest batches that `dp` divides."""
    below = batch - batch % dp
    return f"Nearest batches: {' or '.join(str(size) for size in (below, below + dp) if size)} sequences."


def _tensor(rules: _Rules, gpus: int) -> Iterator[tuple[int, bool]]:
    model, stack, can = rules.model, rules.stack, rules.can
    per_node = rules.workload.cluster.node.num_accelerators
    for tp in divisors(gpus):
        if not rules.allows("tp", tp) or (tp > model.num_attention_heads and "tp" not in rules.constraints):
            continue
        if tp > 1 and not can.tensor:
            rules.refuse("tp", f"{stack.name} has no tensor parallelism")
        elif tp > per_node and "tp" not in rules.constraints:
            rules.refuse(f"tp > {per_node}", "leaves the node; searched if nothing else fits, and where --tp names it")
        else:
            for sequence_parallel in rules.choose("sequence_parallel", (can.sequence,), (False, can.sequence)):
                if not rules.breaks(f"tp = {tp}", Layout(tp=tp, sequence_parallel=sequence_parallel)):
                    yield tp, sequence_parallel


def _context(rules: _Rules, gpus: int, layout: Layout) -> Iterator[tuple[int, str, int]]:
    stack, can, length = rules.stack, rules.can, rules.workload.sequence_length
    methods = can.cp_methods
    least = MIN_TOKENS_BESIDE_EXPERTS if rules.model.num_experts else MIN_TOKENS_PER_CP_RANK
    for cp in divisors(gpus):
        if not rules.allows("cp", cp):
            continue
        if cp == 1:
            if rules.allows("cp_heads", 1) or "cp" in rules.constraints:
                yield 1, "ring", 1
            continue
        if "cp" not in rules.constraints and length // cp < least:
            why = f"leaves a rank fewer than {least} of {length} tokens; --cp {cp} searches it"
            rules.refuse(f"cp > {length // least}", why)
            return
        if not methods:
            rules.refuse("cp", f"{stack.name} has no context parallelism")
            return
        if layout.tp > 1 and can.cp_alone:
            rules.refuse("cp with tp", f"{stack.name} has context parallelism without tensor parallelism only")
            return
        if length % (pieces := can.cp_pieces * cp):
            rules.refuse(f"cp = {cp}", f"{stack.name} cuts sequences into {pieces} pieces, which do not divide {length}")
            continue
        for method in rules.choose("cp_method", methods, methods):
            for heads in _swapping(rules, cp, method, layout.tp):
                if not rules.breaks(f"cp = {cp}, {method}", replace(layout, cp=cp, cp_method=method, cp_heads=heads)):
                    yield cp, method, heads


def _swapping(rules: _Rules, cp: int, method: str, tp: int) -> list[int]:
    """Values of `Layout.cp_heads` to search: the requested ones, else for rings the largest inside a node."""
    if method != "ring+all-to-all":
        return [1] if rules.allows("cp_heads", 1) else []
    heads, per_node = rules.model.num_attention_heads // tp, rules.workload.cluster.node.num_accelerators
    sizes = [n for n in divisors(cp) if 1 < n < cp and rules.allows("cp_heads", n)]
    if "cp_heads" in rules.constraints:
        return sizes
    inside = [n for n in sizes if heads % n == 0 and tp * n <= per_node]
    if "cp_method" in rules.constraints:
        return inside
    if cp * tp <= per_node:
        rules.refuse("ring+all-to-all in a node", "all-to-all, or a ring, over as many ranks; --layout.cp-heads searches it")
        return []
    return inside[-1:]


def _pipeline(rules: _Rules, gpus: int, cp: int) -> Iterator[tuple[int, int, str]]:
    stack, layers = rules.stack, rules.model.num_hidden_layers
    can = rules.can.schedules
    for pp in divisors(gpus):
        if not rules.allows("pp", pp):
            continue
        if pp == 1:
            if rules.allows("virtual_stages", 1) and ("schedule" not in rules.constraints or "pp" in rules.constraints):
                yield 1, 1, Layout.schedule
        elif not can:
            rules.refuse("pp", f"{stack.name} has no pipeline")
        elif cp > 1 and rules.can.cp_alone:
            rules.refuse("cp with pp", f"{stack.name} has context parallelism without a pipeline only")
        elif pp > layers + EMBEDDING_AND_HEAD:
            pp_is_given = "pp" in rules.constraints
            most = layers + EMBEDDING_AND_HEAD
            family, remedy = (f"pp = {pp}", f"Use pp = {most} or less.") if pp_is_given else (f"pp > {most}", "")
            rules.refuse(family, f"more stages than {count_of(layers, 'layer')}, embedding and head", remedy)
        else:
            yield from ((pp, chunks, schedule) for chunks, schedule in _schedules(rules, pp, can))


def _schedules(rules: _Rules, pp: int, can: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    layers = rules.model.num_hidden_layers
    parts = f"{count_of(layers, 'layer')}, embedding and head"
    for schedule in rules.choose("schedule", [name for name in can if not SCHEDULES[name].inferior_to], can):
        if SCHEDULES[schedule].even_ranks and pp % 2:
            rules.refuse(f"pp = {pp}, {schedule}", "needs an even number of stages")
        else:
            for chunks in _chunks(rules, schedule, pp):
                if pp * chunks > layers + EMBEDDING_AND_HEAD:
                    rules.refuse(schedule, f"pp x {chunks} stages are more than {parts}")
                elif not rules.can.cuts(layers, pp * chunks):
                    rules.refuse(schedule, f"{rules.stack.name} does not cut {layers} layers so")
                elif rules.stack.stage_cut == "by-share" and (wrong := cannot_run(rules.model, pp)):
                    rules.refuse(f"pp = {pp}", wrong)
                else:
                    yield chunks, schedule
    if "schedule" not in rules.constraints:
        for name in can:
            if better := SCHEDULES[name].inferior_to:
                rules.refuse(f"schedule {name}", f"{better} {SCHEDULES[name].because}")


def _chunks(rules: _Rules, schedule: str, pp: int) -> list[int]:
    """Virtual stages per rank to search: the requested ones, which may divide layers unevenly, else `chunks_per_rank`."""
    usual = chunks_per_rank(schedule, pp, rules.model.num_hidden_layers)
    any_number = SCHEDULES[schedule].virtual_stages is None
    return [n for n in rules.choose("virtual_stages", usual) if n in usual or (any_number and n > 1)]


def chunks_per_rank(schedule: str, pp: int, num_layers: int) -> tuple[int, ...]:
    """Numbers of stages that a rank may hold: the divisors of its layers if the schedule interleaves stages."""
    chunks = SCHEDULES[schedule].virtual_stages
    return tuple(n for n in divisors(-(-num_layers // pp)) if n > 1) if chunks is None else (chunks,)


def _experts(rules: _Rules, tp: int, ranks: int) -> Iterator[tuple[int, int]]:
    experts = rules.model.num_experts
    can = rules.can
    if not experts:
        yield 1, 1
        return
    for expert_tp in rules.choose("expert_tp", sorted({1, tp} if can.expert_tensor else {1})):
        for ep in divisors(experts):
            if not rules.allows("ep", ep) or (ep > 1 and not can.experts):
                continue
            if ranks % (ep * expert_tp):
                rules.refuse("ep x expert_tp", "does not divide tp x cp x dp")
            elif not rules.breaks(f"expert_tp = {expert_tp}", Layout(ep=ep, expert_tp=expert_tp)):
                yield ep, expert_tp


def _training_choices(rules: _Rules, dp: int, schedule: str, pp: int, share: int, cp: int) -> Column:
    """Rows of (zero_stage, dp_shard, micro_batch_size, recompute, recompute_every); `share` is tp x cp."""
    states = [
        (stage, shard) for stage in _zero_stages(rules, dp * cp, share, schedule) for shard in _shards(rules, stage, dp, share)
    ]
    sizes = [size for size in _trained_sizes(rules, dp, cp) if _suits(rules, schedule, pp, dp, size)]
    modes = []
    can = rules.can.recompute
    for mode in ("blocks",) if rules.named else rules.choose("recompute", can, can):
        every = rules.choose("recompute_every", (2,)) if mode == "every-k" else (2,)
        modes += [(RECOMPUTE.index(mode), interval) for interval in every]
    rows = [(*state, size, *mode) for state in states for size in sizes for mode in modes]
    return np.array(rows, dtype=np.int64).reshape(len(rows), 5)


def _zero_stages(rules: _Rules, replicas: int, share: int, schedule: str) -> list[int]:
    """ZeRO stages; `replicas`: ranks of dp and cp, which hold the same weights; `share` is tp x cp."""
    can = rules.can
    stages = can.zero_stages_with_pipeline if schedule else can.zero_stages
    if can.shards_beside_tensor and share > 1 and replicas > 1:
        stages = tuple(stage for stage in stages if stage > 0)
    wanted = rules.choose("zero_stage", stages if replicas > 1 else (min(stages),))
    for stage in wanted:
        if stage not in stages:
            piped = " with a pipeline" if schedule else ""
            rules.refuse(f"zero_stage = {stage}", f"{rules.stack.name} has {', '.join(map(str, stages))}{piped}")
    return [stage for stage in wanted if stage in stages]


def _shards(rules: _Rules, stage: int, dp: int, share: int) -> list[int]:
    """Sizes of the groups that shard one replica of the state: all of dp, or (HSDP) a node's ranks, times 4, times 16, ..."""
    if stage == 0:
        return [1] if rules.allows("dp_shard", 1) else []
    hybrid = stage in rules.can.hybrid_stages
    if "dp_shard" in rules.constraints:
        requested_sizes = [dp if shard is None else shard for shard in rules.constraints["dp_shard"]]
        return [shard for shard in requested_sizes if shard == dp or (hybrid and dp % shard == 0)]
    if not hybrid:
        return [dp]
    size, sizes = max(2, rules.workload.cluster.node.num_accelerators // share), [dp]
    while size < dp:
        if dp % size == 0:
            sizes.append(size)
        size *= 4
    return sizes


def _micro_batch_sizes(rules: _Rules, dp: int, cp: int) -> list[int]:
    per_rank = rules.workload.sequences_per_batch // dp
    limit = max(1, MAX_TOKENS_PER_MICRO_BATCH // rules.workload.sequence_length)
    if "micro_batch_size" in rules.constraints:  # `plan.search.constraints` reports sizes that do not divide the batch
        return [n for n in divisors(per_rank) if n in rules.constraints["micro_batch_size"]]
    sizes = [n for n in divisors(per_rank) if n <= limit]
    if "dp" in rules.constraints or "cp" in rules.constraints:
        return sizes
    for size in sizes:
        if gcd(size, cp) > 1:
            rules.refuse("cp of even micro-batches", "half the micro-batch over half as many ranks exchanges less")
    return [size for size in sizes if gcd(size, cp) == 1]


def _trained_sizes(rules: _Rules, dp: int, cp: int) -> list[int]:
    """Sizes of a micro-batch of which a rank has no more in a step than the trainer goes through."""
    sizes = _micro_batch_sizes(rules, dp, cp)
    trained = [size for size in sizes if rules.workload.sequences_per_batch // (dp * size) <= MOST_MICRO_BATCHES]
    if sizes and not trained:
        most = MOST_MICRO_BATCHES * dp * max(sizes)
        tokens = format_count(most * rules.workload.sequence_length)
        remedy = f"Give a batch of at most {count_of(most, 'sequence')}, {tokens} tokens, or more GPUs."
        rules.refuse(MANY_MICRO_BATCHES, f"has at most {MOST_MICRO_BATCHES} micro-batches in a step", remedy)
    return trained


def _suits(rules: _Rules, schedule: str, pp: int, dp: int, size: int) -> bool:
    """True if the trainer can run the resulting number of micro-batches in this schedule; else records the reason."""
    count, known = rules.workload.sequences_per_batch // (dp * size), SCHEDULES.get(schedule)
    if known and count < known.fills_from * pp:
        remedy = (
            f"Take a batch of {known.fills_from * pp} micro-batches or more for each rank of dp, fewer stages, or leave it out."
        )
        rules.refuse(schedule, f"fewer than {known.fills_from} x pp micro-batches do not fill it", remedy)
        return False
    fills = rules.stack.stage_cut != "by-share" or not known or known.forward_first
    if not fills and (wrong := cannot_run(rules.model, pp, [count])):
        rules.refuse(f"pp = {pp}, {schedule}", wrong)
        return False
    if known and known.in_rounds and count % pp and not rules.can.any_micro_batches:
        rules.refuse(schedule, "micro-batches are no multiple of pp")
        return False
    return True


def _product(meshes: Sequence[MeshShape], rows: Column, rules: _Rules) -> LayoutTable:
    """Table of each of `meshes` with each of `rows`."""
    whole = replace(rules.base, zero_stage=0, dp_shard=None, layers_per_stage=None)
    layouts = [replace(whole, **mesh._asdict(), tp_overlap=overlaps) for mesh in meshes for overlaps in _overlaps(rules, mesh)]
    table = LayoutTable.of(layouts).take(np.repeat(np.arange(len(layouts)), len(rows)))
    names = ("zero_stage", "dp_shard", "micro_batch_size", "recompute", "recompute_every")
    repeated = {name: np.tile(column, len(layouts)) for name, column in zip(names, rows.T, strict=True)}
    return LayoutTable(**{**vars(table), **repeated, "modes": (rules.named,) if rules.named else ()})


def modules_of_constraints(workload: Workload, constraints: Constraints) -> str:
    """Names of the modules that all layouts of a search recompute, joined; empty if none are requested, or other values too, or
    some that the trainer does not recompute by name."""
    modes = constraints.get("recompute", ())
    if workload.stack.selective not in NAME_MODULES or len(modes) != 1 or not is_modules(modes[0]):
        return ""
    named = modules_named(modes[0])
    return modules_name(named) if named <= {*abilities(workload.stack).modules} else ""


def _overlaps(rules: _Rules, mesh: MeshShape) -> list[bool]:
    """Values of `tp_overlap` to search: the requested ones; True only with sequence parallelism, inside a node and not in a
    precision of `NARROW` (fp8, nvfp4)."""
    in_node = mesh.tp > 1 and rules.workload.cluster.node.num_accelerators % mesh.tp == 0
    can = in_node and mesh.sequence_parallel and rules.base.precision not in NARROW
    return sorted({value and can for value in rules.choose("tp_overlap", (rules.base.tp_overlap,))})
