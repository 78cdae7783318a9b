"""The planner beside experts: 40 published layouts, predicted against their reports, and what a free search takes instead.

    python benchmarks/plan/expert_layouts.py                        # all predicted: seconds
    python benchmarks/plan/expert_layouts.py --search               # and searched, by the same trainer: a minute
    python benchmarks/plan/expert_layouts.py --search --only qwen3  # those whose name has it

`expert_layouts.csv` has the rows, as `ultrascale validate` reads them: of each source what it leads with, one for a model, an
accelerator and a trainer, of its newest release; whole models in pretraining, whose layout is told in full. A report is what
the source printed (`reported`); `could_not` says what the expert could not do then, where a free pick gains more than
`EXPLAINED`.

The table is no blind test. Its rows were chosen by this rule and before any search, but predictions of Megatron-Bridge's runs
had been seen, and one cell was filled with an error in sight: Llama 3's pipeline is interleaved, which its section 3.3.2 says
and its table does not. Laws were mended on some of its sources; what they do to sources left out is in docs/validation.md.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from ultrascale.description.layout import Layout
from ultrascale.plan.search.search import risk, search
from ultrascale.plan.time.price import Prediction, predict
from ultrascale.plan.view.search_view import layout_words
from ultrascale.validation.predict import RowPrediction, predict_rows
from ultrascale.validation.rows import MeasuredRow, read_rows
from ultrascale.validation.setups import setup_of

LAYOUTS = Path(__file__).with_suffix(".csv")
COULD_NOT = {row["id"]: row["could_not"] for row in csv.DictReader(LAYOUTS.open(encoding="utf-8"))}
"""By row: what the expert could not do then."""
CLOSE = 0.15
"""Error of a prediction that is within the bar."""
EXPLAINED = 0.20
"""Gain of a free pick over the expert's layout from which on it must be said what the expert could not do."""
AXES = ("tp", "cp", "pp", "ep", "expert_tp", "zero_stage", "schedule", "virtual_stages", "micro_batch_size", "recompute")


@dataclass(frozen=True)
class Judged:
    """An expert's layout, predicted."""

    row: MeasuredRow
    found: RowPrediction
    expert: Prediction
    """The same in full, of the program and layout that the row is taken to mean."""

    @property
    def error(self) -> float:
        """(predicted - reported) / reported step time; of rows that print FLOP/s alone, of what that makes of it."""
        told, found = self.row.measured, self.found
        assert found.step_seconds and found.tokens_per_second_per_gpu and found.flops_per_second_per_gpu
        if told.step_time_s:
            return found.step_seconds / told.step_time_s - 1
        if told.tokens_per_s_per_gpu:
            return told.tokens_per_s_per_gpu / found.tokens_per_second_per_gpu - 1
        assert told.tflops_per_gpu
        return told.tflops_per_gpu * 1e12 / found.flops_per_second_per_gpu - 1

    @property
    def used_share(self) -> float:
        """Of the device's memory, predicted."""
        return float(self.expert.memory.needed) / float(self.expert.memory.capacity)


@dataclass(frozen=True)
class Pick:
    """What a free search takes for the same model, devices, batch and trainer."""

    best: Prediction | None
    """None if nothing is predicted to fit."""
    gain: float
    """Of tokens per second over the expert's layout, both predicted; 0 without a pick."""
    changes: tuple[str, ...]
    why: str


def judge(rows: list[MeasuredRow]) -> list[Judged]:
    """Every expert's layout, predicted without its report."""
    return [
        Judged(row, found, _in_full(row, found))
        for row, found in zip(rows, predict_rows([row.config for row in rows]), strict=True)
    ]


def _in_full(row: MeasuredRow, found: RowPrediction) -> Prediction:
    setup = setup_of(row.config)
    every = [predict(workload, layout) for workload in setup.workloads for layout in setup.layouts]
    seconds = found.step_seconds
    assert seconds
    return min(every, key=lambda one: (abs(one.step_seconds / seconds - 1), one.memory.reserved))


def pick(judged: Judged) -> Pick:
    """The free pick, and what it changes."""
    expert = judged.expert
    best = search(expert.workload, base=Layout(precision=expert.layout.precision)).best
    if best is None:
        return Pick(None, 0.0, (), "nothing is predicted to fit")
    gain = expert.step_seconds / best.step_seconds - 1
    return Pick(best, gain, tuple(_changes(expert.layout, best.layout)), _why(expert, best))


def _changes(expert: Layout, best: Layout) -> list[str]:
    pairs = ((name, getattr(expert, name), getattr(best, name)) for name in AXES)
    unread = {"schedule", "virtual_stages"} if max(expert.pp, best.pp) == 1 else set()
    return [f"{name} {before} -> {after}" for name, before, after in pairs if before != after and name not in unread]


def _why(expert: Prediction, best: Prediction) -> str:
    """The part of the step that shrinks most."""
    parts = {name: expert.waterfall[name] - best.waterfall[name] for name in expert.waterfall}
    name = max(parts, key=lambda part: parts[part])
    return f"{name.replace('_', ' ')} {best.waterfall[name]:.2f} s instead of {expert.waterfall[name]:.2f}"


def main(search: bool = False, only: str = "") -> int:
    """Print the table.

    Args:
        search: Search every row freely, too.
        only: Rows whose name has this.
    """
    console = Console(width=200)
    rows = [row for row in read_rows(LAYOUTS) if only in row.identity]
    table = Table(box=None)
    for column in ("layout of", "GPUs", "error", "memory", "expert's", *(("gain", "free pick", "why") if search else ())):
        table.add_column(column, overflow="fold")
    every = judge(rows)
    for one in every:
        cells = [_name(one), f"{one.row.config.n_gpus} {one.expert.workload.cluster.accelerator.name}", f"{one.error:+.0%}"]
        cells += [f"{one.used_share:.0%}", layout_words(one.expert.layout, one.expert.num_micro_batches)]
        if search:
            cells += _pick_cells(pick(one), COULD_NOT.get(one.row.identity, ""))
        table.add_row(*cells)
    console.print(table)
    close, fit = sum(abs(one.error) <= CLOSE for one in every), sum(bool(one.found.fits) for one in every)
    inside = sum(one.used_share <= 1 for one in every)
    console.print(f"{close} of {len(every)} within {CLOSE:.0%}; {fit} fit with what must stay free, {inside} the device itself")
    return 0


def _name(one: Judged) -> str:
    return f"{one.row.identity}: {one.row.config.model}"


def _pick_cells(found: Pick, could_not: str) -> list[str]:
    if found.best is None:
        return ["", "nothing fits", ""]
    best = found.best
    words = f"{layout_words(best.layout, best.num_micro_batches)} ({risk(best):.0%} risk)"
    return [f"{found.gain:+.0%}", words, f"{'; '.join(found.changes)}: {found.why}{f'. {could_not}' if could_not else ''}"]


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
