"""Predictions for rows of measured runs.

A prediction sees only `RunConfig`, the cells that describe the run; measured results are in a separate object that only
`validation.scores` reads. Rows of the same workload are predicted together as one table of layouts.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultrascale.catalogue.stacks.stack_files import settings_of
from ultrascale.description.layout import NARROW, Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.recomputed import is_modules
from ultrascale.plan.columns.footprint import Footprint
from ultrascale.plan.constants import Constants
from ultrascale.plan.intervals import interval, kind_of
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.search.replayed import with_replay
from ultrascale.plan.time.price import half_precision_peak, predict, price
from ultrascale.plan.workload import Workload
from ultrascale.validation.cells.flops_conventions import CONVENTIONS, flops_per_token
from ultrascale.validation.cells.models import UnrepresentableError, UnrunnableError
from ultrascale.validation.cells.programs import TUNING, Tuning
from ultrascale.validation.rows import MeasuredRow, RunConfig
from ultrascale.validation.setups import Setup, setup_of

COLUMNS = (
    "id", "predicted_step_time_s", "predicted_tokens_per_s_per_gpu", "predicted_mfu", "predicted_peak_allocated_gib",
    "predicted_peak_reserved_gib", "fits", "low", "high", "reason",
)  # fmt: skip
"""Columns of the predictions file. low and high: the prediction interval of the step time in seconds, which contains
`intervals.COVERAGE` of runs."""
_BROKEN = (SpecError, ValueError, ArithmeticError, LookupError)
"""Rows come from many sources: one that causes an arithmetic error is reported with its reason and does not affect the
others."""


@dataclass(frozen=True)
class RowPrediction:
    """Prediction for a row. Fields are None if the row cannot be represented or cannot run; `reason` explains it."""

    step_seconds: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_second_per_gpu: float | None = None
    flops_per_second_per_gpu: float | None = None
    """FLOP/s per GPU by the row's convention."""
    mfu: float | None = None
    """MFU: that rate over the accelerator's dense peak in the row's precision."""
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    fits: bool | None = None
    needed_share: float | None = None
    """Needed fraction of the device's memory: `Footprint.needed`."""
    kind: str = ""
    """Group whose errors determine its interval: `intervals.kind_of`."""
    reason: str = ""


def predict_rows(rows: Sequence[RunConfig], tuning: Tuning = TUNING) -> list[RowPrediction]:
    """A prediction for every row, in order."""
    predictions = [RowPrediction()] * len(rows)
    groups: dict[str, list[tuple[int, Setup]]] = defaultdict(list)  # by everything except open settings
    for index, row in enumerate(rows):
        try:
            setup = setup_of(row, tuning)
        except UnrepresentableError as error:
            predictions[index] = RowPrediction(fits=False if isinstance(error, UnrunnableError) else None, reason=str(error))
        except _BROKEN as error:
            predictions[index] = RowPrediction(reason=f"cannot be described: {error}")
        else:
            groups[repr(setup.workloads)].append((index, setup))
    for group in groups.values():
        for (index, _), prediction in zip(group, _price([setup for _, setup in group], tuning.constants), strict=True):
            predictions[index] = prediction
    return predictions


def write_predictions(path: str | Path, rows: Sequence[MeasuredRow], predictions: Sequence[RowPrediction]) -> None:
    """Write one line of `COLUMNS` for every row; unknown numbers are blank."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row, p in zip(rows, predictions, strict=True):
            numbers = (
                p.step_seconds, p.tokens_per_second_per_gpu, p.mfu, _gib(p.allocated_bytes), _gib(p.reserved_bytes),
            )  # fmt: skip
            fits = "" if p.fits is None else str(p.fits).lower()
            writer.writerow([row.identity, *map(_cell, numbers), fits, _cell(p.low), _cell(p.high), p.reason])


def _price(setups: list[Setup], constants: Constants) -> list[RowPrediction]:
    """Predictions for rows of equal workloads."""
    ends = np.cumsum([len(setup.layouts) for setup in setups])
    try:
        layouts = [layout for setup in setups for layout in setup.layouts]
        prices = np.array([_priced(workload, layouts, constants) for workload in setups[0].workloads])
        return [
            _choose(setup, prices[..., end - len(setup.layouts) : end], constants)
            for setup, end in zip(setups, ends, strict=True)
        ]
    except _BROKEN as error:
        if len(setups) > 1:
            return [prediction for setup in setups for prediction in _price([setup], constants)]
        return [RowPrediction(reason=f"cannot be priced: {error}")]


def _priced(workload: Workload, layouts: Sequence[Layout], constants: Constants) -> np.ndarray:
    """[4, layouts]: seconds of a step; 1 if it fits; 1 if it runs, its needed bytes being below the device's memory, without
    headroom; and the needed bytes (`Footprint.needed`). Layouts that recompute named modules are priced one by one, all others
    in one table."""
    alone = np.array([is_modules(layout.recompute) for layout in layouts])
    columns = np.zeros((4, len(layouts)))
    for index in (np.flatnonzero(~alone), *np.flatnonzero(alone)[:, None]):
        if len(index):
            prices = price(workload, LayoutTable.of(layouts[int(row)] for row in index), constants)
            memory = prices.memory
            runs = memory.needed <= memory.capacity
            columns[:, index] = prices.step_seconds, prices.fits, runs, memory.needed
    return columns


def _choose(setup: Setup, prices: np.ndarray, constants: Constants) -> RowPrediction:
    """The fastest that fits among all programs and layouts that a row may refer to; else the fastest that runs; else the one
    that needs least memory. `prices`: [programs, 4, layouts], as of `_priced`."""
    seconds, fits, runs, needed = prices.swapaxes(0, 1)
    while True:
        candidates = np.flatnonzero(fits if fits.any() else runs if runs.any() else needed == needed.min())
        program, best = divmod(int(candidates[seconds.flat[candidates].argmin()]), len(setup.layouts))
        step = float(seconds[program, best])
        if not 0 < step < math.inf:
            raise ArithmeticError(f"its step would take {step:g} seconds")
        workload, layout = setup.workloads[program], setup.layouts[best]
        played, memory = _with_simulated_pipeline(workload, layout, step, constants)
        if memory.fits or not fits.any():
            break
        fits[program, best], needed[program, best] = False, memory.needed  # its column was wrong: try the next
    seconds = seconds * (played / step)
    step, kind = played, kind_of(workload, layout)
    spread = seconds.flat[candidates]
    low, high = interval(step, kind, fastest=float(spread.min()), slowest=float(spread.max()))
    rate = workload.tokens_per_step / step / layout.world_size
    convention = setup.config.flops_def if setup.config.flops_def in CONVENTIONS else setup.flops
    flops = rate * flops_per_token(workload.model, workload.sequence_length, convention)
    return RowPrediction(
        step, low, high, rate, flops, flops / _peak(workload, layout), float(memory.allocated), float(memory.reserved),
        bool(memory.fits), float(memory.needed / memory.capacity), kind, _reason(setup, workload, layout),
    )  # fmt: skip


def _with_simulated_pipeline(workload: Workload, layout: Layout, step: float, constants: Constants) -> tuple[float, Footprint]:
    """Step time and memory of a layout with its actions simulated at every stage's own price: a table assumes even stages.
    `step`: the table's, which is kept if no schedule can be built for these numbers of stages and micro-batches."""
    try:
        prediction = with_replay(predict(workload, layout, constants))
    except SpecError:
        return step, price(workload, LayoutTable.of([layout]), constants).row(0).memory
    return step if layout.pp == 1 else prediction.step_seconds, prediction.memory


def _reason(setup: Setup, workload: Workload, layout: Layout) -> str:
    """The assumptions, and the choices made where the row leaves a setting open."""
    chosen = {"micro_batch": layout.micro_batch_size, "recompute": layout.recompute, "vpp": layout.virtual_stages}
    chosen |= settings_of(workload.stack)
    parts = [f"{name} is open: {chosen[name]} is the fastest that fits" for name in setup.open_cells]
    if setup.assumed:
        parts.append("assumed: " + ", ".join(setup.assumed))
    return "; ".join(parts)


def _peak(workload: Workload, layout: Layout) -> float:
    """Dense peak FLOPs per second for the row's MFU: that of its precision."""
    accelerator = workload.accelerator
    narrow = layout.precision if layout.precision in accelerator.peak_flops else "fp8"
    if layout.precision in NARROW and narrow in accelerator.peak_flops:
        return accelerator.peak_flops_per_second(narrow)
    return half_precision_peak(accelerator)


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def _cell(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.6g}"
