"""The best layouts of a cluster: all legal ones bounded, the promising ones priced, the best few simulated, ranked, compared.

    plan.space   every legal layout, tens of thousands of rows
    plan.bounds  rows that cannot fit by what they hold at the least leave
    plan.price   the time of all others; then memory, the fastest first, until no other can matter
    predict      the best of each schedule again, one by one, with their pipelines played action by action
    replay       memory of the first of these: what is printed is never a column

Layouts closer to the fastest than the model can tell apart (`TIE`) are one group: which is fastest is for a measurement. They
are ranked by the time that is expected of them: one that may run out of memory pays for its tries (`expected_seconds`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.units import count_of, divisors
from ultrascale.plan.columns.footprint import HELD, MARGIN, outside_bytes, reserved_bytes, stage_memory
from ultrascale.plan.columns.rank_activations import know_blocks
from ultrascale.plan.intervals import out_of_memory_risk
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.layouts import distinct as distinct_values
from ultrascale.plan.search.asked import unmet
from ultrascale.plan.search.bounds import memory_floors
from ultrascale.plan.search.replayed import with_replay
from ultrascale.plan.search.space import Asked, Refusal, Space, legal_layouts
from ultrascale.plan.time.price import PAIRED, Prediction, predict_rows, price, price_time
from ultrascale.plan.time.stages import cut_stages
from ultrascale.plan.workload import Workload

Floats = NDArray[np.float64]
Progress = Callable[[float], None]
FIRST = 1024
"""Layouts whose memory is worked out first; then twice as many each time, up to `CHUNK`."""
TIME_SHARE = 0.3
"""Part of a search that has passed when the time of every layout is known."""
CHUNK = 16_384
"""Layouts priced at once: small enough that their columns stay in the cache, large enough that NumPy's calls do not show."""
FEW = 256
"""Priced at once in search of the one that needs least."""
KEPT = 256
"""Layouts that pruning must not lose: the ranking is right down to here."""
EXACT = 10
"""Layouts of each schedule (`_kinds`) that are predicted one by one: formulas are right within a percent or two inside most
schedules, but further off between them, so that the best of each must be played to be compared."""
REPLAYED = 10
"""Ways to cut the model at the head of the ranking whose memory is replayed: as many as are listed by default."""
TIE = 0.02
"""Difference of two step times on one cluster below which the model cannot tell them apart (`docs/validation.md`)."""


@dataclass(frozen=True)
class Priced:
    """Every legal layout with what is known about it; `nan` where a bound was enough."""

    space: Space
    step_seconds: Floats
    peak_bytes: Floats
    """Reserved memory and what lies outside torch; for rows that were not priced the least it can be."""
    fits: NDArray[np.bool_]
    too_large: NDArray[np.bool_]
    """Dropped because the training state alone is more than the device."""
    too_slow: NDArray[np.bool_]
    """Dropped because others are faster in no more memory."""
    unfit: NDArray[np.bool_]
    """Dropped because with what a pass holds at the least it is more than the device may reserve."""

    @property
    def table(self) -> LayoutTable:
        return self.space.table

    @property
    def was_priced(self) -> NDArray[np.bool_]:
        return ~self.too_large & ~self.too_slow & ~self.unfit

    @property
    def num_unfit(self) -> int:
        """Layouts that are known not to fit; whether those that are too slow would is not known."""
        return int((~self.too_slow & ~self.fits).sum())


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: ranking, front and priced layouts."""

    workload: Workload
    priced: Priced
    ranked: tuple[Prediction, ...]
    """Layouts that fit, that with the least expected time first."""
    front: tuple[Prediction, ...]
    """Layouts that fit and that no other beats in both time and memory, the fastest first; their bubbles by formula."""
    smallest: Prediction | None
    """The layout that needs the least memory, whether it fits or not; None if there is no legal layout."""
    seconds: float
    """Seconds that the search took."""

    @property
    def best(self) -> Prediction | None:
        return self.ranked[0] if self.ranked else None

    @property
    def num_tied(self) -> int:
        """Layouts at the head of the ranking that the model cannot tell apart."""
        return sum(expected_seconds(one) <= expected_seconds(self.ranked[0]) * (1 + TIE) for one in self.ranked)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        return self.priced.space.refused

    @cached_property
    def further(self) -> tuple[Prediction, ...]:
        """The ranking, with the `REPLAYED` best replayed if fewer were."""
        return tuple(_first_replayed(self.ranked, REPLAYED))

    @cached_property
    def with_rest(self) -> Priced:
        """The layouts with prices also of those that could not matter, for whoever asks what more memory would be worth."""
        return _with_rest(self.workload, self.priced)


def search(
    workload: Workload,
    *,
    base: Layout | None = None,
    asked: Asked | None = None,
    exact: int = EXACT,
    prunes: bool = True,
    shown: int | None = None,
    told: Progress | None = None,
) -> SearchResult:
    """Rank all legal layouts of the workload's cluster.

    `base` gives the fields of a layout that are not searched, `asked` holds searched fields to given values. The best `exact`
    layouts of each schedule are predicted one by one. `prunes` False prices every layout. Of the ranking the first `shown`, if
    given, are known by their replay, else `REPLAYED`. `told` is called now and then with the share that is done. Raises
    SpecError if none is legal, or if a value that is asked for is in none.
    """
    started = time.perf_counter()
    space = legal_layouts(workload, base=base, asked=asked)
    if problems := unmet(workload, asked or {}, space):
        raise SpecError(problems)
    if not len(space.table):
        raise SpecError([_nothing_legal(workload, space)])
    priced = price_all(workload, space, kept=KEPT, prunes=prunes, told=told)
    if not priced.fits.any():
        priced = _across_nodes(workload, base, asked or {}) or priced
    space = priced.space
    ranked = _predict_all(workload, priced, fastest_of_each_schedule(space.table, priced.step_seconds, priced.fits, exact))
    ranked = _first_replayed(ranked, shown or REPLAYED)
    least = int(np.argmin(np.where(priced.was_priced, priced.peak_bytes, np.inf)))
    front = _front(priced)
    prices = price(workload, space.table.take([least, *front]))
    smallest = prices.row(0) if ranked else with_replay(prices.row(0))  # then it is what is printed
    if not ranked and smallest.memory.fits:
        ranked = [smallest]
    on_front = pareto([prices.row(1 + row) for row in range(len(front))])
    return SearchResult(workload, priced, tuple(ranked), tuple(on_front), smallest, time.perf_counter() - started)


def fastest(workload: Workload, *, base: Layout | None = None, asked: Asked | None = None) -> Prediction | None:
    """The fastest layout alone, which needs no more than the fewest prices; None if nothing fits or nothing is legal."""
    space = legal_layouts(workload, base=base, asked=asked)
    if not len(space.table):
        return None
    priced = price_all(workload, space, kept=KEPT)
    if not priced.fits.any():
        priced = _across_nodes(workload, base, asked or {}) or priced
        space = priced.space
    rows = fastest_of_each_schedule(space.table, priced.step_seconds, priced.fits, 1)
    return next(iter(_first_replayed(_predict_all(workload, priced, rows), 1)), None)


def _across_nodes(workload: Workload, base: Layout | None, asked: Asked) -> Priced | None:
    """The search again, with tensor parallelism over nodes too; None if that is asked for already, or adds nothing."""
    per_node, gpus = workload.cluster.node.num_accelerators, workload.cluster.num_accelerators
    wider = [tp for tp in divisors(gpus) if per_node < tp <= workload.model.num_attention_heads]
    if "tp" in asked or not wider:
        return None
    space = legal_layouts(workload, base=base, asked={**asked, "tp": divisors(gpus)[: divisors(gpus).index(wider[-1]) + 1]})
    priced = price_all(workload, space, kept=KEPT) if len(space.table) else None
    return priced if priced is not None and priced.fits.any() else None


def price_all(
    workload: Workload, space: Space, *, kept: int, prunes: bool = True, told: Progress | None = None
) -> Priced:  # fmt: skip
    """Bound or price every layout of `space`; the `kept` fastest that fit, the front of time and memory and, where nothing
    fits, the layout that needs least are right. `told` is called with the share that is done."""
    table = space.table
    at_rest, in_pass = _floors(workload, table)
    seconds, fits, too_slow, unfit = (np.full(len(table), value) for value in (np.nan, False, False, False))
    too_large = at_rest > workload.cluster.accelerator.memory_bytes.value
    if not prunes or too_large.all():
        too_large = np.zeros_like(too_large)
    if prunes:
        unfit = ~too_large & (in_pass > _usable(workload))
    least = np.maximum(at_rest, in_pass)
    found = Priced(space, seconds, np.where(too_large, at_rest, least), fits, too_large, too_slow, unfit)
    waiting = np.flatnonzero(found.was_priced)
    for start in range(0, len(waiting), CHUNK):
        rows = waiting[start : start + CHUNK]
        some = table.take(rows)
        seconds[rows] = price_time(workload, some, cut_stages(workload, some))[0]
        if told is not None:
            told(TIME_SHARE * (start + len(rows)) / len(waiting))
    waiting = waiting[np.argsort(seconds[waiting], kind="stable")]
    kinds = _kinds(table)
    count, size = max(len(waiting), 1), FIRST if prunes else CHUNK
    while len(waiting):
        chunk, waiting = waiting[:size], waiting[size:]
        _price_memory(workload, found, chunk)
        if prunes and len(waiting):
            drop = _cannot_matter(found, waiting, kinds, kept)
            too_slow[waiting[drop]] = True
            waiting = waiting[~drop]
        size = min(2 * size, CHUNK)
        if told is not None:
            told(TIME_SHARE + (1 - TIME_SHARE) * (1 - len(waiting) / count))
    seconds[too_slow] = np.nan
    if not fits.any():
        price_least(workload, found, np.ones(len(table), dtype=bool))
    return found


def _price_memory(workload: Workload, priced: Priced, rows: NDArray[np.intp]) -> None:
    """Memory of these rows into its columns."""
    some = priced.table.take(rows)
    memory = stage_memory(workload, some, cut_stages(workload, some))
    priced.peak_bytes[rows], priced.fits[rows] = memory.needed, memory.fits


def _price_some(workload: Workload, priced: Priced, rows: NDArray[np.intp]) -> None:
    """Prices of these rows into their columns."""
    prices = price(workload, priced.table.take(rows))
    priced.step_seconds[rows], priced.peak_bytes[rows] = prices.step_seconds, prices.memory.needed
    priced.fits[rows], priced.unfit[rows] = prices.fits, False


def price_least(workload: Workload, priced: Priced, rows: NDArray[np.bool_]) -> None:
    """Price of the `unfit` among `rows`, which fit no device, as many as can need less than all that are priced."""
    waiting = np.flatnonzero(priced.unfit & rows)
    waiting = waiting[np.argsort(priced.peak_bytes[waiting], kind="stable")]
    least = float(priced.peak_bytes[priced.was_priced & rows].min(initial=np.inf))
    while len(waiting) and priced.peak_bytes[waiting[0]] < least:
        chunk, waiting = waiting[:FEW], waiting[FEW:]
        _price_some(workload, priced, chunk)
        least = min(least, float(priced.peak_bytes[chunk].min()))


def _with_rest(workload: Workload, priced: Priced) -> Priced:
    """`priced`, with prices of all that were dropped but for those whose state alone is more than the device."""
    copies = {name: column.copy() for name, column in vars(priced).items() if isinstance(column, np.ndarray)}
    found, rows = replace(priced, **copies), np.flatnonzero(priced.unfit | priced.too_slow)
    found.unfit[rows] = found.too_slow[rows] = False
    for start in range(0, len(rows), CHUNK):
        _price_some(workload, found, rows[start : start + CHUNK])
    return found


def _floors(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats]:
    """Least bytes of the state, and least that is taken in a pass, allocator and what lies outside of it included."""
    at_rest, in_pass = np.empty(len(table)), np.empty(len(table))
    know_blocks(workload, table)
    for start in range(0, len(table), CHUNK):
        rows = np.arange(start, min(start + CHUNK, len(table)))
        some = table.take(rows)
        at_rest[rows], live = memory_floors(workload, some)
        beyond = reserved_bytes(live, joins_segments=workload.stack.joins_segments) - live
        in_pass[rows] = live + HELD * beyond + outside_bytes(some)
    return at_rest, in_pass


def _usable(workload: Workload) -> float:
    """Bytes of a device that may be taken."""
    return workload.cluster.accelerator.memory_bytes.value * (1 - MARGIN) * (1 + 1e-9)


def _cannot_matter(priced: Priced, rows: NDArray[np.intp], kinds: NDArray[np.intp], kept: int) -> NDArray[np.bool_]:
    """True for `rows`, all of them slower than those whose memory is known, that can be neither among the `kept` fastest, nor
    among the best `EXACT` of their kind, nor on the front."""
    if np.count_nonzero(priced.fits) < kept:
        return np.zeros(len(rows), dtype=bool)
    enough = np.bincount(kinds[priced.fits], minlength=kinds.max() + 1) >= EXACT
    least = priced.peak_bytes[priced.fits].min()
    return enough[kinds[rows]] & (priced.peak_bytes[rows] >= least)


def _fastest(priced: Priced, count: int) -> NDArray[np.intp]:
    """Numbers of the fastest rows that fit."""
    fitting = np.flatnonzero(priced.fits)
    return fitting[np.argsort(priced.step_seconds[fitting], kind="stable")][:count]


def fastest_of_each_schedule(table: LayoutTable, step_seconds: Floats, fits: NDArray[np.bool_], count: int) -> NDArray[np.intp]:
    """Numbers of the fastest rows that fit, `count` of each of `_kinds`."""
    fitting = np.flatnonzero(fits)
    order = fitting[np.argsort(step_seconds[fitting], kind="stable")]
    kind = _kinds(table)[order]
    return np.concatenate([order[kind == one][:count] for one in distinct_values(kind)] or [order])


def _kinds(table: LayoutTable) -> NDArray[np.intp]:
    """Number of each layout's schedule, 0 without a pipeline. A schedule of pairs has one for each pp: what pairs hide is no
    formula's, which is up to a tenth off there, less or more by the size of a stage."""
    kinds = table.schedule + 1 + np.where(PAIRED[table.schedule], len(PAIRED) * table.pp, 0)
    return np.where(table.pp > 1, kinds, 0).astype(np.intp)


def _front(priced: Priced) -> list[int]:
    """Numbers of the rows that fit and that no row beats in both time and memory."""
    order = _fastest(priced, len(priced.fits))
    if not len(order):
        return []
    peak = priced.peak_bytes[order]
    before = np.concatenate([[np.inf], np.minimum.accumulate(peak)[:-1]])
    return order[peak < before].tolist()


def _predict_all(workload: Workload, priced: Priced, rows: Sequence[int] | NDArray[np.intp]) -> list[Prediction]:
    """Exact prices of these rows by expected time; those that turn out not to fit are left out."""
    found = predict_rows(workload, priced.table.take(rows))
    return sorted((one for one in found if one.memory.fits), key=expected_seconds)


def risk(one: Prediction) -> float:
    """Chance that it runs out of memory."""
    is_ours = one.workload.stack.name == "ultrascale"
    return out_of_memory_risk(float(one.memory.needed), float(one.memory.capacity), is_replayed=is_ours)


def expected_seconds(one: Prediction) -> float:
    """Seconds of a step over the chance that it gets through."""
    return one.step_seconds / (1 - risk(one))


def _first_replayed(ranked: Sequence[Prediction], count: int) -> list[Prediction]:
    """`ranked` in the order of what is known once `count` ways to cut the model are replayed, those that turn out not to fit
    left out: the first, and of the `REPLAYED` best those that a smaller risk than their columns say would bring there. A replay
    moves what it is of, so that others may come to the head and are replayed too."""
    found, replayed = list(ranked), set[int]()
    while waiting := [one for one in _among_first(distinct(found)[:REPLAYED], count) if id(one) not in replayed]:
        after = {id(one): with_replay(one) for one in waiting}
        found = [after.get(id(one), one) for one in found]
        replayed |= {id(one) for one in after.values()}
        found = sorted((one for one in found if one.memory.fits), key=expected_seconds)
    return found


def _among_first(ranked: Sequence[Prediction], count: int) -> list[Prediction]:
    """Ways among the first `count`, or that would be there if nothing were known of their memory but that they fit."""
    last = expected_seconds(ranked[min(count, len(ranked)) - 1]) if ranked else 0.0
    return [one for number, one in enumerate(ranked) if number < count or one.step_seconds < last]


def distinct(ranked: Iterable[Prediction]) -> list[Prediction]:
    """The fastest of each way to cut the model."""
    best: dict[tuple[object, ...], Prediction] = {}
    for one in ranked:
        best.setdefault(_way(one), one)
    return list(best.values())


def _way(one: Prediction) -> tuple[object, ...]:
    """Same axes, ZeRO stage and recomputation."""
    own = one.layout
    return own.tp, own.cp, own.pp, own.ep, own.expert_tp, own.zero_stage, own.recompute


def pareto(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Pareto front: predictions that no other beats in both time and memory, the fastest first."""
    front: list[Prediction] = []
    for one in sorted(predictions, key=lambda p: (p.step_seconds, p.memory.needed)):
        if not front or one.memory.needed < front[-1].memory.needed:
            front.append(one)
    return front


def _nothing_legal(workload: Workload, space: Space) -> Problem:
    """Why there is nothing to search."""
    gpus = workload.cluster.num_accelerators
    told = [one for one in space.refused if one.remedy] or list(space.refused)
    reason = f": {told[0].family} {told[0].reason}" if told else ""
    remedy = (
        told[0].remedy if told and told[0].remedy else "Free one of the settings, or change the number of GPUs or the batch."
    )
    return Problem("layout", f"no layout of {count_of(gpus, 'GPU')} is legal{reason}", remedy)
