"""The best layouts of a cluster: bounds all legal layouts, prices the promising ones, simulates and ranks the best.

    space    every legal layout, tens of thousands of rows (`plan.search.space`)
    bounds   drops rows whose lower bound does not fit (`plan.search.bounds`)
    price    time of all others (`plan.time.price`); then memory, the fastest first, until no other row can matter
    predict  the best of each schedule again, one by one, with their pipelines simulated action by action
    replay   memory of the first of these: printed memory never comes from columns

Layouts within `TIE` of the fastest form one group: the model cannot tell them apart, only a measurement can. The ranking is by
expected time, in which a layout that may run out of memory pays for failed attempts (`expected_seconds`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError, expect_none
from ultrascale.description.units import count_of, divisors
from ultrascale.plan.columns.footprint import MARGIN, RETAINED_SHARE, outside_bytes, reserved_bytes, stage_memory
from ultrascale.plan.columns.rank_activations import cache_blocks
from ultrascale.plan.intervals import out_of_memory_risk
from ultrascale.plan.layouts import Bools, Floats, Indices, LayoutTable
from ultrascale.plan.layouts import distinct as distinct_values
from ultrascale.plan.search.bounds import pass_floor, state_floor
from ultrascale.plan.search.constraints import unmet
from ultrascale.plan.search.replayed import with_replay
from ultrascale.plan.search.space import MANY_MICRO_BATCHES, Constraints, Refusal, Space, legal_layouts
from ultrascale.plan.time.blocks import cache_prices, distinct_shapes
from ultrascale.plan.time.price import PAIRED, Prediction, predict_rows, price, price_time
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.workload import Workload

Progress = Callable[[float], None]
FIRST = 1024
"""Layouts whose memory is computed in the first batch; each batch doubles, up to `CHUNK`."""
TIME_SHARE = 0.3
"""Fraction of a search that is done when the time of every layout is known."""
CHUNK = 16_384
"""Layouts priced at once: few enough that their columns stay in the cache, enough to hide the cost of NumPy's calls."""
SHAPES = 512
"""Distinct shapes computed at once: with a few kinds of blocks they fill no cache of operations (`work.work`), most of a
search's memory."""
SMALL_CHUNK = 256
"""Layouts priced at once when looking for the one that needs least memory."""
NUM_RANKED = 256
"""Layouts that pruning must not lose: the ranking is exact down to here."""
EXACT = 10
"""Layouts of each schedule (`_kinds`) that are predicted one by one: formulas are within 1 or 2 percent inside most schedules,
but further off between schedules, so the best of each are simulated before they are compared."""
REPLAYED = 10
"""Partitionings (`distinct`) at the head of the ranking whose memory is replayed: as many as are listed by default."""
SURE = 0.6
"""Fraction of the usable memory below which a search that sorts thousands takes a layout's risk to run out for none."""
TIE = 0.02
"""Difference of two step times on one cluster below which the model cannot tell them apart (`docs/validation.md`)."""


@dataclass(frozen=True)
class PricedLayouts:
    """Every legal layout with its prices; `nan` if it was dropped by a bound."""

    space: Space
    step_seconds: Floats
    peak_bytes: Floats
    """Reserved memory plus memory outside torch; a lower bound for rows that were not priced."""
    fits: Bools
    too_large: Bools
    """Dropped because the training state alone exceeds the device."""
    too_slow: Bools
    """Dropped because others are faster in no more memory."""
    unfit: Bools
    """Dropped because the lower bound of a pass exceeds the memory that may be reserved."""

    @property
    def table(self) -> LayoutTable:
        return self.space.table

    @property
    def was_priced(self) -> Bools:
        return ~self.too_large & ~self.too_slow & ~self.unfit

    @property
    def num_unfit(self) -> int:
        """Number of layouts known not to fit; those dropped as too slow are not counted, their memory is unknown."""
        return int((~self.too_slow & ~self.fits).sum())


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: ranking, front and priced layouts."""

    workload: Workload
    priced: PricedLayouts
    ranked: tuple[Prediction, ...]
    """Layouts that fit, by ascending expected time."""
    smallest: Prediction | None
    """The layout that needs the least memory, whether it fits or not; None if there is no legal layout."""
    seconds: float
    """Seconds that the search took."""

    @property
    def best(self) -> Prediction | None:
        return self.ranked[0] if self.ranked else None

    def is_tied(self, prediction: Prediction) -> bool:
        """True if the model cannot tell the layout apart from the best (`TIE`)."""
        return bool(self.ranked) and expected_seconds(prediction) <= expected_seconds(self.ranked[0]) * (1 + TIE)

    @property
    def num_tied(self) -> int:
        """Number of layouts at the head of the ranking that the model cannot tell apart."""
        return sum(map(self.is_tied, self.ranked))

    @property
    def refused(self) -> tuple[Refusal, ...]:
        return self.priced.space.refused

    def replayed(self, shown: int | None) -> SearchResult:
        """This result with the first `shown` layouts replayed (default: `REPLAYED`), if fewer were."""
        return replace(self, ranked=tuple(_first_replayed(self.ranked, shown or REPLAYED)))

    @cached_property
    def front(self) -> tuple[Prediction, ...]:
        """Pareto front of time and memory among layouts that fit, the fastest first: of `ranked` and of those on the front by
        formulas, each predicted like the ranking. Memory is from columns where the ranking was not replayed."""
        by_formulas = predict_rows(self.workload, self.priced.table.take(_front(self.priced)))
        fitting = [prediction for prediction in by_formulas if prediction.memory.fits]
        return tuple(pareto({prediction.layout: prediction for prediction in (*fitting, *self.ranked)}.values()))

    @cached_property
    def fully_priced(self) -> PricedLayouts:
        """The layouts with prices of dropped ones too, except those whose state alone exceeds the device, to estimate the value
        of more memory."""
        copies = {name: column.copy() for name, column in vars(self.priced).items() if isinstance(column, np.ndarray)}
        completed, rows = replace(self.priced, **copies), np.flatnonzero(self.priced.unfit | self.priced.too_slow)
        completed.unfit[rows] = completed.too_slow[rows] = False
        for start in range(0, len(rows), CHUNK):
            _price_rows(self.workload, completed, rows[start : start + CHUNK])
        return completed


def search(
    workload: Workload,
    *,
    base: Layout | None = None,
    constraints: Constraints | None = None,
    shown: int | None = None,
    on_progress: Progress | None = None,
) -> SearchResult:
    """Rank all legal layouts of the workload's cluster.

    `base` gives the fields of a layout that are not searched, `constraints` holds searched fields to given values. The best
    `EXACT` layouts of each schedule are predicted one by one. The first `shown` layouts of the ranking are replayed (default:
    `REPLAYED`). `on_progress` is called now and then with the fraction that is done.
    Raises SpecError if no layout is legal, or if a requested value is in none.
    """
    started = time.perf_counter()
    space = legal_layouts(workload, base=base, constraints=constraints)
    expect_none(unmet(workload, constraints or {}, space))
    if not len(space.table):
        raise SpecError([_nothing_legal(workload, space)])
    priced, ranked = _ranked(workload, space, base, constraints or {}, on_progress)
    ranked = _first_replayed(ranked, shown or REPLAYED)
    least = int(np.argmin(np.where(priced.was_priced, priced.peak_bytes, np.inf)))
    smallest = price(workload, priced.table.take([least])).row(0)
    if not ranked:
        smallest = with_replay(smallest)  # then it is what is printed
    if not ranked and smallest.memory.fits:
        ranked, priced.fits[least] = [smallest], True
    return SearchResult(workload, priced, tuple(ranked), smallest, time.perf_counter() - started)


def fastest(workload: Workload, *, base: Layout | None = None, constraints: Constraints | None = None) -> Prediction | None:
    """Only the best layout, `search(...).best`, with no more memory replayed than that takes; None if nothing fits or no
    layout is legal."""
    space = legal_layouts(workload, base=base, constraints=constraints)
    if not len(space.table):
        return None
    _, ranked = _ranked(workload, space, base, constraints or {})
    return next(iter(_first_replayed(ranked, 1)), None)


def _ranked(
    workload: Workload, space: Space, base: Layout | None, constraints: Constraints, on_progress: Progress | None = None
) -> tuple[PricedLayouts, list[Prediction]]:
    """Prices of `space`, or with tensor parallelism across nodes if nothing fits otherwise; and predictions of the best
    `EXACT` layouts of each schedule, by ascending expected time, without those that turn out not to fit."""
    priced = price_all(workload, space, on_progress=on_progress)
    if not priced.fits.any():
        priced = _across_nodes(workload, base, constraints) or priced
    expected = expected_columns(workload, priced.step_seconds, priced.peak_bytes)
    rows = fastest_of_each_schedule(priced.table, expected, priced.fits, EXACT)
    return priced, _fitting(predict_rows(workload, priced.table.take(rows)))


def _across_nodes(workload: Workload, base: Layout | None, constraints: Constraints) -> PricedLayouts | None:
    """Repeat the search with tensor parallelism across nodes too; None if that was requested already, or adds nothing."""
    per_node, gpus = workload.cluster.node.num_accelerators, workload.cluster.num_accelerators
    wider = [tp for tp in divisors(gpus) if per_node < tp <= workload.model.num_attention_heads]
    if "tp" in constraints or not wider:
        return None
    space = legal_layouts(
        workload, base=base, constraints={**constraints, "tp": divisors(gpus)[: divisors(gpus).index(wider[-1]) + 1]}
    )
    priced = price_all(workload, space) if len(space.table) else None
    return priced if priced is not None and priced.fits.any() else None


def price_all(
    workload: Workload, space: Space, *, num_ranked: int = NUM_RANKED, prunes: bool = True,
    on_progress: Progress | None = None,
) -> PricedLayouts:  # fmt: skip
    """Bound or price every layout of `space`. Exact for the `num_ranked` fastest that fit, the Pareto front of time and memory
    and, if nothing fits, the layout that needs least. `on_progress` is called with the fraction that is done."""
    table = space.table
    at_rest = _in_chunks(table, np.arange(len(table)), partial(state_floor, workload))
    seconds, fits, too_slow, unfit = (np.full(len(table), value) for value in (np.nan, False, False, False))
    too_large = at_rest > workload.accelerator.memory_bytes.value
    if not prunes or too_large.all():
        too_large = np.zeros_like(too_large)
    least, possible = at_rest, np.flatnonzero(~too_large)
    _cache_shapes(workload, table, possible)
    in_pass = _in_chunks(table, possible, partial(_pass_floor, workload))
    least[possible] = np.maximum(at_rest[possible], in_pass)
    if prunes:
        unfit[possible] = in_pass > _usable(workload)
    priced = PricedLayouts(space, seconds, least, fits, too_large, too_slow, unfit)
    waiting = np.flatnonzero(priced.was_priced)
    for start in range(0, len(waiting), CHUNK):
        rows = waiting[start : start + CHUNK]
        subset = table.take(rows)
        seconds[rows] = price_time(workload, subset, partition_stages(workload, subset))[0]
        if on_progress is not None:
            on_progress(TIME_SHARE * (start + len(rows)) / len(waiting))
    waiting = waiting[np.argsort(seconds[waiting], kind="stable")]
    kinds = _kinds(table)
    count, size = max(len(waiting), 1), FIRST if prunes else CHUNK
    while len(waiting):
        chunk, waiting = waiting[:size], waiting[size:]
        _price_memory(workload, priced, chunk)
        if prunes and len(waiting):
            drop = _cannot_matter(workload, priced, waiting, kinds, num_ranked)
            too_slow[waiting[drop]] = True
            waiting = waiting[~drop]
        size = min(2 * size, CHUNK)
        if on_progress is not None:
            on_progress(TIME_SHARE + (1 - TIME_SHARE) * (1 - len(waiting) / count))
    seconds[too_slow] = np.nan
    if not fits.any():
        price_least(workload, priced, np.ones(len(table), dtype=bool))
    return priced


def _price_memory(workload: Workload, priced: PricedLayouts, rows: Indices) -> None:
    """Compute the memory of these rows, in place."""
    subset = priced.table.take(rows)
    memory = stage_memory(workload, subset, partition_stages(workload, subset))
    priced.peak_bytes[rows], priced.fits[rows] = memory.needed, memory.fits


def _price_rows(workload: Workload, priced: PricedLayouts, rows: Indices) -> None:
    """Price these rows, in place."""
    prices = price(workload, priced.table.take(rows))
    priced.step_seconds[rows], priced.peak_bytes[rows] = prices.step_seconds, prices.memory.needed
    priced.fits[rows], priced.unfit[rows] = prices.fits, False


def price_least(workload: Workload, priced: PricedLayouts, rows: Bools) -> None:
    """Price, in place, those `unfit` layouts among `rows` that may need less memory than every priced one."""
    waiting = np.flatnonzero(priced.unfit & rows)
    waiting = waiting[np.argsort(priced.peak_bytes[waiting], kind="stable")]
    least = float(priced.peak_bytes[priced.was_priced & rows].min(initial=np.inf))
    while len(waiting) and priced.peak_bytes[waiting[0]] < least:
        chunk, waiting = waiting[:SMALL_CHUNK], waiting[SMALL_CHUNK:]
        _price_rows(workload, priced, chunk)
        least = min(least, float(priced.peak_bytes[chunk].min()))


def _in_chunks(table: LayoutTable, rows: Indices, bound: Callable[[LayoutTable], Floats]) -> Floats:
    """`bound` of these rows of `table`, `CHUNK` at a time."""
    chunks = [bound(table.take(rows[start : start + CHUNK])) for start in range(0, len(rows), CHUNK)]
    return np.concatenate(chunks) if chunks else np.empty(0)


def _pass_floor(workload: Workload, table: LayoutTable) -> Floats:
    """Lower bounds in bytes of a pass, with the allocator's share and memory outside torch."""
    live = pass_floor(workload, table)
    beyond = reserved_bytes(live, joins_segments=workload.stack.joins_segments) - live
    return live + RETAINED_SHARE * beyond + outside_bytes(table)


def _cache_shapes(workload: Workload, table: LayoutTable, rows: Indices) -> None:
    """Compute, and cache, bytes and seconds of every distinct shape of these rows: of `SHAPES` shapes all that is asked before
    those of the next, so that the operations of a shape are listed once and then forgotten."""
    every_shape, shape_of = distinct_shapes(workload, table)
    shapes = [every_shape[number] for number in distinct_values(shape_of[rows])]
    for start in range(0, len(shapes), SHAPES):
        few = shapes[start : start + SHAPES]
        if not table.modes:
            cache_blocks(workload, few)
        cache_prices(workload, few)


def _usable(workload: Workload) -> float:
    """Bytes of a device that may be used."""
    return workload.accelerator.memory_bytes.value * (1 - MARGIN) * (1 + 1e-9)


def _cannot_matter(workload: Workload, priced: PricedLayouts, rows: Indices, kinds: Indices, num_ranked: int) -> Bools:
    """True for `rows` that cannot be among the `num_ranked` of least expected time, the best `EXACT` of their kind, or on the
    Pareto front. All `rows` are slower than those with known memory; the expected time of those may be longer all the same."""
    known = np.flatnonzero(priced.fits)
    expected = expected_columns(workload, priced.step_seconds[known], priced.peak_bytes[known])
    known = known[expected <= priced.step_seconds[rows[0]]]
    if len(known) < num_ranked:
        return np.zeros(len(rows), dtype=bool)
    enough = np.bincount(kinds[known], minlength=kinds.max() + 1) >= EXACT
    least = priced.peak_bytes[priced.fits].min()
    return enough[kinds[rows]] & (priced.peak_bytes[rows] >= least)


def fastest_of_each_schedule(table: LayoutTable, seconds: Floats, fits: Bools, count: int) -> Indices:
    """Indices of the rows that fit with the least `seconds`, `count` of each of `_kinds`."""
    fitting = np.flatnonzero(fits)
    order = fitting[np.argsort(seconds[fitting], kind="stable")]
    kind = _kinds(table)[order]
    return np.concatenate([order[kind == number][:count] for number in distinct_values(kind)] or [order])


def _kinds(table: LayoutTable) -> Indices:
    """Number of each layout's schedule, 0 without a pipeline. A schedule that pairs passes has one number for each pp: formulas
    do not cover what pairs hide, and are up to 10 % off there, depending on the size of a stage."""
    kinds = table.schedule + 1 + np.where(PAIRED[table.schedule], len(PAIRED) * table.pp, 0)
    return np.where(table.pp > 1, kinds, 0).astype(np.intp)


def _front(priced: PricedLayouts) -> list[int]:
    """Indices of the rows on the Pareto front of time and memory, among those that fit."""
    fitting = np.flatnonzero(priced.fits)
    order = fitting[np.argsort(priced.step_seconds[fitting], kind="stable")]
    peak = priced.peak_bytes[order]
    before = np.minimum.accumulate(np.append(np.inf, peak))[:-1]
    return order[peak < before].tolist()


def _fitting(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Predictions that fit, by ascending expected time."""
    return sorted((prediction for prediction in predictions if prediction.memory.fits), key=expected_seconds)


def risk(prediction: Prediction) -> float:
    """Probability that the layout runs out of memory."""
    return _risk(prediction.workload, float(prediction.memory.needed))


def _risk(workload: Workload, needed_bytes: float) -> float:
    capacity = workload.accelerator.memory_bytes.value
    return out_of_memory_risk(needed_bytes, capacity, is_replayed=workload.stack.name == "ultrascale")


def expected_columns(workload: Workload, step_seconds: Floats, needed_bytes: Floats) -> Floats:
    """`expected_seconds` of every row; the memory of those that do not fit does not count."""
    expected = step_seconds.copy()
    for row in np.flatnonzero((needed_bytes > SURE * _usable(workload)) & (needed_bytes <= _usable(workload))).tolist():
        expected[row] /= 1 - _risk(workload, float(needed_bytes[row]))
    return expected


def expected_seconds(prediction: Prediction) -> float:
    """Seconds of a step divided by the probability that it fits in memory."""
    return prediction.step_seconds / (1 - risk(prediction))


def _first_replayed(ranked: Sequence[Prediction], count: int) -> list[Prediction]:
    """`ranked` with its first `count` partitionings replayed, sorted again, without those that turn out not to fit. Also
    replays those of the `REPLAYED` best that would be among the first at a lower risk than their columns say. A replay can move
    a layout, so others may come to the head, which are replayed too."""
    predictions, replayed = list(ranked), set[int]()
    while waiting := [
        prediction for prediction in _among_first(distinct(predictions)[:REPLAYED], count) if id(prediction) not in replayed
    ]:
        replays = {id(prediction): with_replay(prediction) for prediction in waiting}
        predictions = _fitting(replays.get(id(prediction), prediction) for prediction in predictions)
        replayed |= {id(prediction) for prediction in replays.values()}
    return predictions


def _among_first(ranked: Sequence[Prediction], count: int) -> list[Prediction]:
    """Partitionings among the first `count`, or that would be there if they certainly fit."""
    last = expected_seconds(ranked[min(count, len(ranked)) - 1]) if ranked else 0.0
    return [prediction for number, prediction in enumerate(ranked) if number < count or prediction.step_seconds < last]


def distinct(ranked: Iterable[Prediction]) -> list[Prediction]:
    """The fastest layout of each partitioning (`_ranking_key`)."""
    best: dict[tuple[object, ...], Prediction] = {}
    for prediction in ranked:
        best.setdefault(_ranking_key(prediction), prediction)
    return list(best.values())


def _ranking_key(prediction: Prediction) -> tuple[object, ...]:
    """Key of layouts with the same axes, ZeRO stage and recomputation."""
    layout = prediction.layout
    return layout.tp, layout.cp, layout.pp, layout.ep, layout.expert_tp, layout.zero_stage, layout.recompute


def pareto(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Pareto front of time and memory, the fastest first."""
    front: list[Prediction] = []
    for prediction in sorted(predictions, key=lambda p: (p.step_seconds, p.memory.needed)):
        if not front or prediction.memory.needed < front[-1].memory.needed:
            front.append(prediction)
    return front


def _nothing_legal(workload: Workload, space: Space) -> Problem:
    """Problem that says why there is no legal layout."""
    gpus = workload.cluster.num_accelerators
    many = [refusal for refusal in space.refused if refusal.family == MANY_MICRO_BATCHES]  # all else of these was legal
    refusals = many or [refusal for refusal in space.refused if refusal.remedy] or space.refused
    reason = f": {refusals[0].family} {refusals[0].reason}" if refusals else ""
    remedy = refusals[0].remedy if refusals else ""
    remedy = remedy or "Free one of the settings, or change the number of GPUs or the batch."
    return Problem("layout", f"no layout of {count_of(gpus, 'GPU')} is legal{reason}", remedy)
