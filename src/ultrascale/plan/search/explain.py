"""Why this layout: the playbook's three steps with numbers, the value of each choice of the best layout, and its bottleneck.

fit     kinds of sharding, cheapest first: the least memory that each needs, and the fastest step that it allows
batch   dp x micro-batch x accumulation = the global batch
fast    one choice of the best layout changed at a time: the time it costs, or gains and how much memory it lacks
prices  the same search with 10 GB more memory, a 20 % faster network, ...: the value of a better machine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from ultrascale.catalogue.cluster import Cluster, Link
from ultrascale.description.layout import Layout
from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.layouts import COLUMNS, Bools, LayoutTable
from ultrascale.plan.search.search import (
    PricedLayouts,
    SearchResult,
    expected_columns,
    expected_seconds,
    fastest_of_each_schedule,
)
from ultrascale.plan.time.price import Prediction, predict, predict_rows, price
from ultrascale.plan.workload import Workload

MORE_MEMORY_BYTES = 10e9
FASTER = 1.2
POOL = 512
"""Layouts of each selection of `_pool` that are searched again for a changed machine."""
UNLIMITED = "unlimited memory"
BINDS = 0.05
"""Speed that more memory has to bring, to be called what binds."""
PLAYED = 3
"""Layouts of each schedule whose pipelines are simulated."""


@dataclass(frozen=True)
class Rung:
    """One kind of sharding more than the rung before."""

    name: str
    num_layouts: int
    least_bytes: float
    """Memory of the layout that needs least, everything before this rung allowed too."""
    fits: bool
    fastest_seconds: float | None
    """Seconds of a step of the fastest layout that fits, predicted like the ranking; None if none does."""


@dataclass(frozen=True)
class Change:
    """One choice of the best layout made another way."""

    name: str
    """The field."""
    value: str
    also: str
    """Other fields that had to change with it: `schedule interleaved, virtual_stages 2`; mostly empty."""
    seconds: float
    peak_bytes: float
    fits: bool


@dataclass(frozen=True)
class Marginal:
    """Gain in speed from a better machine, its layout searched again."""

    name: str
    seconds: float
    """Seconds of a step of the fastest layout that fits it."""
    gain: float
    """Tokens per second more, as a share."""


def rungs(result: SearchResult) -> list[Rung]:
    """Ladder to a model that fits and is fast: kinds of sharding, added one by one, the cheapest first."""
    table = result.priced.table
    alone = (table.tp == 1) & (table.pp == 1) & (table.cp == 1)
    whole, no_recompute = table.zero_stage == 0, table.recompute == 0
    ladder: list[tuple[str, Bools]] = [
        ("data parallelism", alone & whole & no_recompute),
        ("+ ZeRO 1", alone & (table.zero_stage <= 1) & no_recompute),
        ("+ ZeRO 2", alone & (table.zero_stage <= 2) & no_recompute),
        ("+ ZeRO 3", alone & no_recompute),
        ("+ recomputation", alone),
        ("+ context parallelism", (table.tp == 1) & (table.pp == 1)),
        ("+ tensor parallelism", table.pp == 1),
        ("+ pipeline", np.ones(len(table), dtype=bool)),
    ]
    steps, before = [], np.zeros(len(table), dtype=bool)
    for name, rows in ladder:
        if (rows & ~before).any():
            steps.append(_rung(name, result, rows))
        before |= rows
    return steps


def _rung(name: str, result: SearchResult, rows: Bools) -> Rung:
    priced = result.fully_priced
    best = fastest_of_each_schedule(priced.table, priced.step_seconds, rows & priced.fits, PLAYED)
    seconds = [prediction.step_seconds for prediction in predict_rows(result.workload, priced.table.take(best))]
    return Rung(name, int(rows.sum()), float(priced.peak_bytes[rows].min()), bool(seconds), min(seconds, default=None))


def is_bound(rung: Rung, result: SearchResult) -> bool:
    """True if the rung's least memory is a lower bound: of a training state that alone exceeds the device."""
    priced = result.fully_priced
    return bool((priced.peak_bytes[priced.too_large] == rung.least_bytes).any())


# The choices of a layout, and the columns that may change with each; dp follows from the number of devices.
_CHOICES: dict[str, tuple[str, ...]] = {
    "micro_batch_size": (),
    "recompute": ("recompute_every",),
    "zero_stage": ("dp_shard",),
    "dp_shard": (),
    "tp": ("dp_shard", "expert_tp"),
    "cp": ("cp_method", "cp_heads", "dp_shard"),
    "pp": ("virtual_stages", "schedule", "dp_shard"),
    "schedule": ("virtual_stages",),
    "ep": ("expert_tp",),
}


def changes(result: SearchResult) -> list[Change]:
    """Best layout with each choice changed to each other value, all else equal where that is legal: the fastest of each."""
    best = result.best
    if best is None:
        return []
    table, alternatives = result.priced.table, []
    current = LayoutTable.of([best.layout])
    for name, along in _CHOICES.items():
        free = {name, *along, "dp"} | ({"dp_shard"} if best.layout.shard_size == best.layout.dp else set())
        same = np.ones(len(table), dtype=bool)
        for column in COLUMNS:
            if column not in free:
                same &= getattr(table, column) == getattr(current, column)[0]
        if best.layout.shard_size == best.layout.dp and "dp_shard" not in (name, *along):
            same &= (table.dp_shard == table.dp) | (table.zero_stage == 0)
        rows = np.flatnonzero(same & (getattr(table, name) != getattr(current, name)[0]))
        alternatives += _fastest_by_value(result.workload, table.take(rows), name, (best.layout, along))
    return alternatives


def _fastest_by_value(workload: Workload, table: LayoutTable, name: str, of: tuple[Layout, Sequence[str]]) -> list[Change]:
    """For each value of a column, the fastest row that fits, or else the row that needs least memory. `of`: the layout that is
    changed, and the fields that change along where no row keeps them."""
    if not len(table):
        return []
    prices = price(workload, table)
    needed = prices.memory.needed
    alternatives = []
    for value in np.unique(getattr(table, name)):
        rows = np.flatnonzero(getattr(table, name) == value)
        kept = [row for row in rows if not _also(table.layout(int(row)), *of)]
        rows = np.array(kept) if kept else rows
        fitting = rows[prices.fits[rows]]
        row = int(fitting[np.argmin(prices.step_seconds[fitting])] if len(fitting) else rows[np.argmin(needed[rows])])
        layout = table.layout(row)
        seconds = predict(workload, layout).step_seconds
        text = str(getattr(layout, name) or int(value))
        alternatives.append(Change(name, text, _also(layout, *of), seconds, float(needed[row]), bool(prices.fits[row])))
    return alternatives


def _also(layout: Layout, before: Layout, along: Sequence[str]) -> str:
    """Fields among `along` that differ and mean something, with their new values."""
    changed = {name: _value(layout, name) for name in along if _value(layout, name) != _value(before, name)}
    if layout.pp == 1:
        changed = {name: value for name, value in changed.items() if name not in ("schedule", "virtual_stages")}
    return ", ".join(f"{name} {value}" for name, value in changed.items())


def _value(layout: Layout, name: str) -> object:
    if name == "dp_shard":
        return "all of dp" if layout.shard_size == layout.dp else layout.shard_size
    return getattr(layout, name)


def marginals(result: SearchResult) -> list[Marginal]:
    """Gains from better machines, the largest first. For each machine, the fastest layouts are searched again."""
    best = result.best
    if best is None:
        return []
    pool = _pool(result.fully_priced, result.workload.accelerator.memory_bytes.value)
    workload = result.workload
    base, current = best.step_seconds, best.layout
    gains = []
    for name, change, constants in _BETTER:
        changed = replace(workload, cluster=change(workload.cluster))
        seconds = _fastest(changed, pool, current, constants)
        gains.append(Marginal(name, seconds, base / seconds - 1))
    return sorted(gains, key=lambda marginal: -marginal.gain)


def seconds_otherwise(result: SearchResult, workload: Workload) -> float:
    """Seconds of a step of the fastest layout that fits if `workload` takes the place of the search's, on the same machine."""
    best = result.best
    assert best is not None
    pool = _pool(result.priced, workload.accelerator.memory_bytes.value, POOL // 4)
    return _fastest(workload, pool, best.layout, CONSTANTS)


def binding(best: Prediction, gains: list[Marginal]) -> str:
    """One sentence that names the bottleneck of the step."""
    parts = sorted(best.waterfall.items(), key=lambda item: -item[1])
    name, seconds = parts[0]
    share = f"{name.replace('_', ' ')} is {seconds / best.step_seconds:.0%} of the step"
    memory = next((marginal for marginal in gains if marginal.name == UNLIMITED), None)
    if memory is None or memory.gain < 0.01:
        return f"Memory does not bind; {share}."
    little = "" if memory.gain >= BINDS else " little"
    return f"Memory binds{little}: without its limit a step would be {memory.gain:.0%} faster; {share}."


def _pool(priced: PricedLayouts, capacity_bytes: float, most: int = POOL) -> LayoutTable:
    """Layouts to search again: the fastest `most` of all, of those that fit or nearly fit, and of those that fit."""
    nearly = priced.peak_bytes <= capacity_bytes + MORE_MEMORY_BYTES
    rows = []
    for mask in (priced.was_priced, priced.was_priced & nearly, priced.fits):
        numbers = np.flatnonzero(mask)
        rows.append(numbers[np.argsort(priced.step_seconds[numbers], kind="stable")][:most])
    return priced.table.take(np.unique(np.concatenate(rows)))


def _fastest(workload: Workload, pool: LayoutTable, current: Layout, constants: Constants) -> float:
    """Seconds of the fastest step that fits, among `pool` and the `current` layout."""
    prices = price(workload, pool, constants)
    seconds = expected_columns(workload, prices.step_seconds, prices.memory.needed)
    rows = fastest_of_each_schedule(pool, seconds, prices.fits, PLAYED)
    layouts = [current, *(pool.layout(int(row)) for row in rows)]
    predictions = [predict(workload, layout, constants) for layout in layouts]
    return min(predictions, key=expected_seconds).step_seconds


def _with_memory(cluster: Cluster, more_bytes: float) -> Cluster:
    accelerator = cluster.accelerator
    more = replace(accelerator.memory_bytes, value=accelerator.memory_bytes.value + more_bytes)
    return replace(cluster, node=replace(cluster.node, accelerator=replace(accelerator, memory_bytes=more)))


def _with_links(cluster: Cluster, name: str) -> Cluster:
    """`cluster` with links inside nodes (`intra_link`) or between them (`inter_link`) 20 % faster."""
    return replace(cluster, node=replace(cluster.node, **{name: _faster(getattr(cluster.node, name))}))


def _faster(link: Link | None) -> Link | None:
    if link is None:
        return None
    achieved = link.achieved_bytes_per_second
    return replace(
        link,
        bytes_per_second=replace(link.bytes_per_second, value=link.bytes_per_second.value * FASTER),
        achieved_bytes_per_second=achieved and replace(achieved, value=achieved.value * FASTER),
    )


_BETTER: tuple[tuple[str, Callable[[Cluster], Cluster], Constants], ...] = (
    ("10 GB more memory", partial(_with_memory, more_bytes=MORE_MEMORY_BYTES), CONSTANTS),
    ("network between nodes 20% faster", partial(_with_links, name="inter_link"), CONSTANTS),
    ("links inside the node 20% faster", partial(_with_links, name="intra_link"), CONSTANTS),
    (
        "matrix products 20% faster",
        lambda cluster: cluster,
        replace(CONSTANTS, compute_derate=CONSTANTS.compute_derate / FASTER),
    ),
    (UNLIMITED, partial(_with_memory, more_bytes=inf), CONSTANTS),
)
