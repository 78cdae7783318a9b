"""Results of `ultrascale.plan`, `search` and `compare`: a plan, the ranking it was chosen from, two plans compared."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ultrascale.api.displays import Rows, TableRow, bars, html, shares
from ultrascale.api.planning.plan_request import PlanRequest
from ultrascale.api.stamp import stamped
from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes, format_seconds
from ultrascale.plan.costs.budget import Bought, bought, parse_budget
from ultrascale.plan.report import RunPlan, step_interval

if TYPE_CHECKING:
    from ultrascale.api.planning.plan_search import SearchOutcome
    from ultrascale.plan.time.price import Prediction


@dataclass(frozen=True, repr=False)
class Plan(Rows):
    """Predicted memory and time of one run."""

    chosen: RunPlan
    """The planner's full prediction."""
    request: PlanRequest
    """The request that this plan answers."""
    compared: tuple[RunPlan, ...] = ()
    """Plans that it was chosen from, on a machine whose speed has not been measured."""
    searched: SearchOutcome | None = None
    """Search that it was chosen from, for a model on accelerators."""

    @property
    def run(self) -> Run:
        """The planned run, including its layout."""
        return self.chosen.run

    @property
    def layout(self) -> Layout:
        """Layout of the planned run."""
        return self.run.layout

    @property
    def fits(self) -> bool:
        """True if the plan fits into a device's memory."""
        return self.chosen.fits

    @property
    def step_seconds(self) -> float | None:
        """Step time in seconds; None if the device's speed is measured at run time."""
        return self.chosen.prediction and self.chosen.prediction.step_seconds

    @property
    def step_interval(self) -> tuple[float, float] | None:
        """80% prediction interval of `step_seconds`: (lower, upper) in seconds."""
        return self.chosen.prediction and step_interval(self.chosen.prediction)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices together."""
        return self.chosen.prediction and self.chosen.prediction.tokens_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of a step (0 to 1)."""
        return self.chosen.prediction and self.chosen.prediction.mfu()

    @property
    def needed_bytes(self) -> int:
        """Device memory needed in bytes, including the allocator's cache and NCCL."""
        return self.chosen.needed_bytes

    @property
    def headroom_bytes(self) -> int:
        """Usable device memory that remains, in bytes; negative if the plan does not fit."""
        return self.chosen.headroom_bytes

    @property
    def reserve_bytes(self) -> int:
        """Device memory in bytes that must stay free."""
        return self.chosen.reserve_bytes

    @property
    def command(self) -> str:
        """The command line that prints this plan."""
        return shlex.join(["ultrascale", "plan", *self.request.words])

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Requested files that were not written, because no layout fits."""
        options = self.request.options
        wanted = (options.save, options.svg, options.perfetto)
        nothing_fits = self.searched is not None and self.searched.result.best is None
        return tuple(name for name in wanted if name is not None) if nothing_fits else ()

    def flags(self) -> str:
        """The plan as settings of its framework: the output of `--print-flags`."""
        from ultrascale.plan.flags.trainers import trainer_flags
        from ultrascale.plan.report import workload_of

        return trainer_flags(workload_of(self.run, self.chosen.cluster, self.chosen.stack), self.layout)

    def to_toml(self) -> str:
        """The run as a TOML file for `check` and `train`: the output of `--save`."""
        return to_toml(self.run)

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale plan --json`, in bytes, seconds, FLOPs and tokens."""
        document = self.chosen.to_json()
        if self.searched is not None:
            options = self.request.options
            document["search"] = self.searched.to_json(top=options.top, explained=options.explain)
        if len(self.compared) > 1:
            document["compared"] = [
                {
                    "zero_stage": run_plan.run.layout.zero_stage,
                    "recompute": run_plan.run.layout.recompute,
                    "fits": run_plan.fits,
                    "peak_bytes": run_plan.peak_bytes,
                    "seconds_per_step": run_plan.prediction and run_plan.prediction.step_seconds,
                }
                for run_plan in self.compared
            ]
        if (budget := self.bought) is not None:
            document["budget"] = asdict(budget)
        return stamped("plan", document | {"notes": self.notes})

    @property
    def notes(self) -> list[str]:
        """Warnings, such as little headroom or a default that costs time."""
        from ultrascale.plan.view.notes import notes

        return notes(self.chosen, self.searched and self.searched.result)

    @property
    def bought(self) -> Bought | None:
        """Training that the given budget buys; None without a budget, or if no price is listed."""
        text, prediction = self.request.options.budget, self.chosen.prediction
        return None if text is None or prediction is None else bought(parse_budget(text), prediction)

    def rows(self) -> list[TableRow]:
        """Peak memory by category (bytes), and step time by component (seconds)."""
        document = self.chosen.to_json()
        memory, time = document["memory"]["peak_bytes_by_category"], document["time"]
        seconds = {} if time is None else time["waterfall_seconds"]
        return [
            *({"of": "memory", "part": name, "value": value, "unit": "bytes"} for name, value in memory.items() if value),
            *({"of": "step", "part": name, "value": value, "unit": "seconds"} for name, value in seconds.items() if value),
        ]

    def plot(self) -> Any:
        """A matplotlib figure: memory by category, and the waterfall of the step. Raises NotInstalledError without
        matplotlib."""
        return shares(repr(self), self.rows())

    def __repr__(self) -> str:
        chosen, words = self.chosen, _layout_words(self.layout, self.chosen.num_micro_batches)
        name = f"Plan({chosen.run.model.name or chosen.run.model.model_type} on {chosen.cluster.name}: {words}; "
        memory = f"{format_bytes(self.needed_bytes)} of {format_bytes(chosen.capacity_bytes)}"
        return name + f"{_step_words(chosen.prediction)}{memory}{'' if self.fits else ', does not fit'})"

    def _repr_html_(self) -> str:
        rows = [{**row, "value": value_words(row["value"], row["unit"])} for row in self.rows()]
        return html(repr(self), [{"of": row["of"], "part": row["part"], "": row["value"]} for row in rows])


@dataclass(frozen=True, repr=False)
class Search(Rows):
    """All layouts of a model on machines, ranked by step time if they fit."""

    plan: Plan
    """The best layout; the smallest if none fits."""
    searched: SearchOutcome

    @property
    def ranked(self) -> list[Prediction]:
        """The fastest layout of each way to shard the model, fastest first."""
        from ultrascale.plan.search.search import distinct

        return distinct(self.searched.result.ranked)

    @property
    def front(self) -> tuple[Prediction, ...]:
        """Pareto front: layouts that no other beats in both time and memory."""
        return self.searched.result.front

    def __len__(self) -> int:
        return len(self.ranked)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.ranked)

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale plan --json` for a search."""
        return self.plan.to_dict()

    def rows(self) -> list[TableRow]:
        """One row per layout: rank, step time, MFU, memory, and the fields of the layout."""
        return [_prediction_row(number, prediction) for number, prediction in enumerate(self.ranked, start=1)]

    def plot(self) -> Any:
        """A matplotlib figure: step time against memory of every ranked layout. Raises NotInstalledError without matplotlib."""
        from ultrascale.api.displays import scatter

        return scatter(repr(self), self.rows(), "needed_bytes", "step_seconds")

    def __repr__(self) -> str:
        result, chosen = self.searched.result, self.plan.chosen
        on = f"{chosen.run.model.name or chosen.run.model.model_type} on {chosen.cluster.name}"
        priced = result.priced
        unfit = f", at least {priced.num_unfit:,} do not fit" if priced.num_unfit else ""
        count = f"{len(priced.fits):,} legal layouts{unfit}"
        if result.best is None:
            return f"Search({on}: {count})"
        best = result.best
        step, words = format_seconds(best.step_seconds), _layout_words(best.layout, best.num_micro_batches)
        return f"Search({on}: {count}, best {words}, {step} a step)"

    def _repr_html_(self) -> str:
        top = self.ranked[: self.plan.request.options.top]
        return html(repr(self), [_ranking_words(number, prediction) for number, prediction in enumerate(top, start=1)])


@dataclass(frozen=True, repr=False)
class Comparison(Rows):
    """Two plans compared."""

    a: Plan
    b: Plan

    def settings(self) -> list[TableRow]:
        """Settings, machines and framework in which the two runs differ."""
        from ultrascale.config.schema import leaves, setting_at

        runs = [plan.run for plan in (self.a, self.b)]
        named = {
            key: [setting_at(run, key) for run in runs]
            for key in leaves()
            if key not in ("name", "folder") and not key.startswith("launch.")
        }
        chosen = (self.a.chosen, self.b.chosen)
        named |= {"machines": [plan.cluster.name for plan in chosen], "stack": [plan.stack.name for plan in chosen]}
        return [{"name": name, "a": a, "b": b} for name, (a, b) in named.items() if a != b]

    def setting_words(self) -> list[tuple[str, str, str]]:
        """`settings` as in run.toml, without quotes; if two models have different names, only the names."""
        from ultrascale.config.resolve import toml_value
        from ultrascale.config.schema import BYTE_KEYS

        def words(name: str, value: Any) -> str:
            is_bytes = isinstance(value, int) and name.rpartition(".")[2] in BYTE_KEYS
            return format_bytes(value) if is_bytes else toml_value(value).strip('"')

        rows = [
            (setting["name"], words(setting["name"], setting["a"]), words(setting["name"], setting["b"]))
            for setting in self.settings()
        ]
        a, b = (plan.run.model.name or plan.run.model.model_type for plan in (self.a, self.b))
        if a == b:
            return rows
        return [("model", a, b), *(row for row in rows if not row[0].startswith("model."))]

    def rows(self) -> list[TableRow]:
        """Quantities of both plans with the ratio b / a (bytes, seconds, shares), largest differences first."""
        of_a, of_b = _quantities(self.a), _quantities(self.b)
        compared = [_row(name, unit, of_a.get((name, unit)), of_b.get((name, unit))) for name, unit in {**of_a, **of_b}]
        return sorted(compared, key=lambda row: -_distance(row))

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ, quantities, and both plans as in `Plan.to_dict`."""
        return stamped("compare", {
            "settings": self.settings(), "quantities": self.rows(), "a": self.a.to_dict(), "b": self.b.to_dict(),
        })  # fmt: skip

    def plot(self) -> Any:
        """A matplotlib figure: b / a, one bar per quantity that differs. Raises NotInstalledError without matplotlib."""
        return bars(repr(self), [(row["name"], row["b_over_a"]) for row in self.rows() if row["b_over_a"] not in (None, 1.0)])

    def __repr__(self) -> str:
        a, b = self.a.step_seconds, self.b.step_seconds
        time = "" if a is None or b is None else f"step {format_seconds(a)} and {format_seconds(b)}, "
        memory = " and ".join(format_bytes(plan.needed_bytes) for plan in (self.a, self.b))
        differences = ", ".join(f"{name} {a} -> {b}" for name, a, b in self.setting_words()[:3]) or "nothing differs"
        return f"Comparison({differences}; {time}{memory})"

    def _repr_html_(self) -> str:
        words = [
            {"": row["name"], "a": value_words(row["a"], row["unit"]), "b": value_words(row["b"], row["unit"]),
             "b / a": "" if row["b_over_a"] is None else f"{row['b_over_a']:.2f}"} for row in self.rows()
        ]  # fmt: skip
        settings = [{"": name, "a": a, "b": b, "b / a": ""} for name, a, b in self.setting_words()]
        return html(repr(self), settings + words)


def _row(name: str, unit: str, a: float | None, b: float | None) -> TableRow:
    return {"name": name, "unit": unit, "a": a, "b": b, "b_over_a": b / a if a and b is not None else None}


def _distance(row: TableRow) -> float:
    """Sort key: totals first, then by distance between the two plans."""
    ratio = row["b_over_a"]
    return 0.0 if ratio is None or ratio <= 0 else max(ratio, 1 / ratio) - 1


def _quantities(plan: Plan) -> dict[tuple[str, str], float]:
    quantities: dict[tuple[str, str], float | None] = {
        ("step", "seconds"): plan.step_seconds, ("tokens per second", "tokens/s"): plan.tokens_per_second,
        ("MFU", "share"): plan.mfu,
        ("memory needed", "bytes"): plan.needed_bytes,
    }  # fmt: skip
    known = {key: value for key, value in quantities.items() if value is not None}
    return known | {(f"{row['of']}: {row['part']}", row["unit"]): row["value"] for row in plan.rows()}


def _prediction_row(rank: int, pred: Prediction) -> TableRow:
    low, high = step_interval(pred)
    needed, headroom = round(float(pred.memory.needed)), round(float(pred.memory.headroom))
    numbers = {
        "rank": rank, "step_seconds": pred.step_seconds, "step_seconds_low": low, "step_seconds_high": high, "mfu": pred.mfu(),
        "tokens_per_second": pred.tokens_per_second, "needed_bytes": needed, "headroom_bytes": headroom,
        "num_micro_batches": pred.num_micro_batches,
    }  # fmt: skip
    return numbers | {name: getattr(pred.layout, name) for name in Layout.__dataclass_fields__}


def _ranking_words(number: int, prediction: Prediction) -> TableRow:
    memory = format_bytes(float(prediction.memory.needed))
    words = _layout_words(prediction.layout, prediction.num_micro_batches)
    return {
        "": number,
        "step": format_seconds(prediction.step_seconds),
        "MFU": f"{prediction.mfu():.1%}",
        "memory": memory,
        "layout": words,
    }


def _layout_words(layout: Layout, num_micro_batches: int) -> str:
    from ultrascale.plan.view.search_view import layout_words

    return layout_words(layout, num_micro_batches)


def _step_words(prediction: Prediction | None) -> str:
    if prediction is None:
        return ""
    low, high = step_interval(prediction)
    interval = f"{format_seconds(low)} to {format_seconds(high)}"
    return f"{format_seconds(prediction.step_seconds)} a step ({interval}), MFU {prediction.mfu():.1%}, "


def value_words(value: Any, unit: str) -> str:
    """A quantity as text: bytes and seconds with their units, shares in percent; empty for None."""
    if value is None:
        return ""
    if unit in ("bytes", "seconds"):
        return format_bytes(value) if unit == "bytes" else format_seconds(value)
    return f"{value:.1%}" if unit == "share" else f"{value:,.0f}"
