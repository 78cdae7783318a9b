"""One plan as data to draw: numbers in bytes and seconds, each with its text, so that the page does no formatting itself.

`answer` is everything that a browser receives. Its `json` is the output of `ultrascale plan --json` for the same question.
Results that take longer than a slider allows are a separate part, `REST`: a browser requests it once the first is drawn.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from ultrascale.catalogue.stacks.stack_files import STACKS, stack_file
from ultrascale.config.resolve import to_toml
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.problems import SpecError
from ultrascale.description.schedules import SCHEDULES
from ultrascale.description.units import count_of, format_bytes, format_count, format_hours, format_seconds
from ultrascale.page.documents import number
from ultrascale.page.ranked import ranking, reasons, scaling_rows, settings_of
from ultrascale.page.step.ranks import rank_memories
from ultrascale.page.step.roofline import operation_costs, peak_flops
from ultrascale.page.step.sent import communication_per_step
from ultrascale.plan.columns.footprint import Footprint
from ultrascale.plan.costs.budget import tokens_to_train
from ultrascale.plan.costs.cost import cost
from ultrascale.plan.flags.trainers import WRITERS, trainer_flags
from ultrascale.plan.report import RunPlan, not_trainable, plan_run, step_interval, workload_of
from ultrascale.plan.search.search import SearchResult
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.time.step_parts import step_parts
from ultrascale.plan.view.notes import TIGHT_BYTES, notes
from ultrascale.plan.view.plan_view import FOOTPRINT, TIMES
from ultrascale.plan.view.search_view import layout_words
from ultrascale.plan.view.step_timeline import step_timeline

DRAWN_TURNS = 4
"""Micro-batches drawn for each rank of a pipeline: enough for fill, steady state and drain, with readable numbers."""
MOST_DRAWN_RANKS = 64
"""Ranks of a pipeline that are drawn."""
FIRST, REST = PARTS = ("first", "rest")
"""Parts of an answer."""
MOST_OPERATIONS = 24
"""Most operations of the roofline: the longest."""
LEAST_LISTED = 0.0005
"""Smallest part of the compute time that is listed beside the operations."""
AXES = {
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "expert_parallel": "ep",
    "data_parallel": "dp",
    "pipeline_sends": "pp",
}


@dataclass(frozen=True)
class PagePlan:
    """The planner's answer to a question."""

    chosen: RunPlan
    json: dict[str, Any]
    """JSON as the command line prints it."""
    result: SearchResult | None = None
    """Result of the search; None for a run's file, which has one layout."""
    conditions: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = None
    """Tokens to train on; None: 20 per parameter."""
    explanation: Callable[[], dict[str, Any]] | None = None
    """Function that computes what --explain adds to a search's JSON; it takes seconds, and runs only when asked for."""
    sufficient: Callable[[], str] | None = None
    """Function that computes the sentence on the number of GPUs on which a layout fits; called only if none fits."""


def answer(planned: PagePlan, words: list[str], *, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """All data to draw for a plan, JSON-able. `words`: the equivalent arguments of the command line."""
    document: dict[str, Any] = {"schema": "ultrascale/page/1", "command": " ".join(["ultrascale plan", shlex.join(words)])}
    if FIRST in parts:
        document |= _first(planned)
    if REST in parts:
        document |= _rest(planned)
    return document


def _first(planned: PagePlan) -> dict[str, Any]:
    chosen = planned.chosen
    document: dict[str, Any] = {
        "title": _title(chosen),
        "verdict": _verdict(chosen),
        "notes": notes(chosen, planned.result),
        "facts": _facts(planned),
        "waterfall": [],
        "schedule": None,
        "run_toml": to_toml(chosen.run),
        "json": json.dumps(planned.json, indent=2),
    }
    if chosen.prediction is not None:
        document |= {"waterfall": _waterfall(chosen.prediction), "schedule": _schedule(chosen.prediction)}
        document["own"] = settings_of(chosen.prediction)
    if planned.result is not None:
        document |= {"ranking": ranking(planned.result), "why": reasons(planned.result, planned.json)}
        document |= {"scaling": scaling_rows(planned.json)}
    return document


def _rest(planned: PagePlan) -> dict[str, Any]:
    chosen = planned.chosen
    document: dict[str, Any] = {"memory": _memory(planned), "flags": _flags(chosen)}
    if chosen.prediction is not None:
        document |= {"roofline": _roofline(chosen.prediction), "sent": _sent(chosen)}
    if planned.sufficient is not None and planned.result is not None and planned.result.best is None:
        document["sufficient"] = planned.sufficient()
    return document


def _title(chosen: RunPlan) -> dict[str, str]:
    model, cluster = chosen.run.model, chosen.cluster
    nodes = f", {count_of(cluster.num_nodes, 'node')}" if cluster.num_nodes > 1 else ""
    return {
        "model": f"{model.name or model.model_type}, {format_count(num_parameters(model))} parameters",
        "machine": f"{chosen.run.layout.world_size} x {cluster.accelerator.title}{nodes}",
        "layout": layout_words(chosen.run.layout, chosen.num_micro_batches),
    }


def _verdict(chosen: RunPlan) -> dict[str, Any]:
    """The verdict: whether the layout fits, in a sentence, and its rating: good, tight or bad."""
    headroom = chosen.headroom_bytes
    need, have = format_bytes(chosen.needed_bytes), format_bytes(chosen.capacity_bytes)
    if not chosen.fits:
        return {"kind": "bad", "text": f"Does not fit: {need} of {have}, {format_bytes(-headroom)} too much."}
    if headroom < TIGHT_BYTES:
        return {"kind": "tight", "text": f"Fits with little headroom: {need} of {have}, {format_bytes(headroom)} left."}
    return {"kind": "good", "text": f"Fits: {need} of {have}, {format_bytes(headroom)} of headroom."}


def _facts(planned: PagePlan) -> list[dict[str, str]]:
    """Name, value and note of each fact that is shown as a number."""
    chosen, prediction = planned.chosen, planned.chosen.prediction
    batch = chosen.run.batch
    tokens = batch.sequences_per_batch * batch.sequence_length
    rows = [
        (
            "Global batch",
            f"{tokens:,} tokens",
            f"{count_of(batch.sequences_per_batch, 'sequence')} of {batch.sequence_length:,}",
        )
    ]
    if prediction is not None:
        low, high = (format_seconds(seconds) for seconds in step_interval(prediction))
        condition = "" if chosen.fits else ", if it fitted"
        rows = [
            (f"Step{condition}", format_seconds(prediction.step_seconds), f"80% prediction interval: {low} to {high}"),
            (
                f"Tokens a second{condition}",
                f"{prediction.tokens_per_second:,.0f}",
                f"{prediction.tokens_per_second_per_gpu:,.0f} a GPU",
            ),
            (f"MFU{condition}", f"{prediction.mfu():.1%}", f"HFU {prediction.hfu():.1%}"),
            *rows,
        ]
        if chosen.fits:
            goal, why = tokens_to_train(chosen.run.model, planned.tokens)
            expense = cost(chosen.cluster, goal / prediction.tokens_per_second, num_gpus=chosen.run.layout.world_size)
            rows.append(
                ("Training", format_seconds(expense.seconds), f"on {format_count(goal)} tokens{why}, without interruptions")
            )
            rows.append(("GPU hours", format_hours(expense.gpu_hours), expense.words.removeprefix(", ")))
    headroom = format_bytes(abs(chosen.headroom_bytes))
    margin = f"{format_bytes(chosen.reserve_bytes)} more is kept free for the allocator"
    rows.insert(1, ("Headroom" if chosen.fits else "Too much", headroom, margin))
    if not_trainable(chosen.run) or chosen.stack.name != "ultrascale":
        trained = "does not run this layout"
    else:
        trained = "runs this layout" if chosen.fits else "would run out of memory"
    rows.append(("ultrascale train", trained, f"planned for {chosen.stack.name}"))
    return [dict(zip(("name", "text", "note"), row, strict=True)) for row in rows]


def _memory(planned: PagePlan) -> dict[str, Any]:
    """Memory by category at the peak, for the layout and with each ZeRO stage, against the device; and per pipeline stage."""
    chosen = planned.chosen
    bars = []
    for stage, plan in _stages_of_zero(planned).items():
        assert plan.prediction is not None
        is_chosen = stage == chosen.run.layout.zero_stage
        parts = _parts(plan.prediction.memory, plan.needed_bytes)
        bars.append({"label": f"ZeRO {stage}", "chosen": is_chosen, "fits": plan.fits, "parts": parts}
                    | number(plan.needed_bytes, format_bytes)
                    | {"step": format_seconds(plan.prediction.step_seconds), "zero_stage": stage})  # fmt: skip
    ranks = []
    for name, categories in rank_memories(chosen.prediction) if chosen.prediction is not None else ():
        total = sum(categories.values())
        ranks.append({"label": name, "parts": _known_parts(categories)} | number(total, format_bytes))
    capacity, usable = chosen.capacity_bytes, chosen.usable_bytes
    return {
        "bars": bars, "ranks": ranks, "capacity": number(capacity, format_bytes),
        "usable": number(usable, format_bytes),
        "legend": [{"name": name, "label": label, "note": note} for name, (label, _, note) in FOOTPRINT.items()],
    }  # fmt: skip


def _stages_of_zero(planned: PagePlan) -> dict[int, RunPlan]:
    """The chosen layout under ZeRO stages 0 to 3, the valid ones; empty if its time is unknown."""
    chosen, plans = planned.chosen, {}
    if chosen.prediction is None:
        return plans
    for stage in range(4):
        layout = chosen.run.layout
        if stage != layout.zero_stage:
            layout = replace(layout, zero_stage=stage, dp_shard=layout.dp_shard if stage else None)
        try:
            run = replace(chosen.run, layout=layout)
            plans[stage] = chosen if layout == chosen.run.layout else _planned(planned, run)
        except SpecError:  # this model or framework has no such stage
            continue
    return plans


def _planned(planned: PagePlan, run: Any) -> RunPlan:
    if problems := run.layout.problems():
        raise SpecError(list(problems))
    return plan_run(run, planned.chosen.cluster, planned.chosen.stack, **planned.conditions)


def _parts(memory: Footprint, needed: int) -> list[dict[str, Any]]:
    known = {name: float(value) for name, value in memory.categories.items()}
    outside = float(memory.outside)
    return _known_parts(known | {"reserve": max(0.0, needed - outside - sum(known.values())), "outside": outside})


def _known_parts(known: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"name": name, "label": FOOTPRINT[name][0], **number(value, format_bytes)} for name, value in known.items() if value
    ]


def _waterfall(prediction: Prediction) -> list[dict[str, Any]]:
    """Waterfall of the step's time, in the planner's order; `axis`: the axis of a communication."""
    return [
        {"name": name, "label": TIMES[name][0], "share": f"{seconds / prediction.step_seconds:.1%}", "axis": AXES.get(name, ""),
         **number(seconds, format_seconds)}
        for name, seconds in prediction.waterfall.items() if seconds > 0
    ]  # fmt: skip


def _roofline(prediction: Prediction) -> dict[str, Any] | None:
    """Operations of the step, the longest first, and the device's two bounds; None if its bandwidth is unknown."""
    accelerator, work = prediction.workload.accelerator, operation_costs(prediction)
    if accelerator.memory_bytes_per_second is None or not work:
        return None
    peak, bandwidth = peak_flops(prediction), accelerator.memory_bytes_per_second.value
    total_seconds, rows = sum(op.seconds for op in work), []
    for op in work[:MOST_OPERATIONS]:
        rate, traffic = op.flops / op.seconds, op.num_bytes / op.seconds
        bound = min(peak, op.intensity * bandwidth)
        reached = rate / bound if op.flops else traffic / bandwidth
        rows.append({
            "name": op.name, "kind": op.kind, "seconds": op.seconds, "text": format_seconds(op.seconds),
            "share": f"{op.seconds / total_seconds:.1%}", "times": f"{op.count:,.0f}", "intensity": op.intensity, "rate": rate,
            "rate_text": f"{rate / 1e12:,.0f} TFLOP/s" if op.flops else f"{traffic / 1e12:.2f} TB/s",
            "intensity_text": f"{op.intensity:,.0f} FLOP/B" if op.flops else "",
            "bound": "compute" if op.flops and bound == peak else "memory", "reached": f"{reached:.0%}",
        })  # fmt: skip
    return {
        "rows": rows, "peak": {"value": peak, "text": f"{peak / 1e12:,.0f} TFLOP/s"},
        "bandwidth": {"value": bandwidth, "text": f"{bandwidth / 1e12:.2f} TB/s"}, "device": accelerator.title,
        "ridge": f"{peak / bandwidth:,.0f} FLOP/B", "account": _account(prediction, [op.seconds for op in work]),
    }  # fmt: skip


def _account(prediction: Prediction, seconds: list[float]) -> dict[str, Any]:
    """Compute time of the step as the sum of its parts: the operations, of these `seconds` each, and what is beside them."""
    compute, gaps = prediction.waterfall["compute"], step_parts(prediction)["launch gaps"]
    shorter = seconds[MOST_OPERATIONS:]
    parts = {
        "the operations below": sum(seconds[:MOST_OPERATIONS]),
        f"{count_of(len(shorter), 'shorter one')}": sum(shorter),
        "waiting for launches": gaps,
        "slowed by communication that overlaps": compute - gaps - sum(seconds),
    }
    listed = {name: value for name, value in parts.items() if value >= LEAST_LISTED * compute}
    return number(compute, format_seconds) | {
        "parts": [{"label": name, **number(value, format_seconds)} for name, value in listed.items()]
    }


def _sent(chosen: RunPlan) -> dict[str, Any]:
    """Bytes that a rank sends per step, by axis and kind of message; no rows if this package's trainer cannot run the
    layout."""
    assert chosen.prediction is not None
    rank, rows = communication_per_step(chosen.run, chosen.prediction)
    note = f"Rank {rank} of {chosen.run.layout.world_size:,}, as our trainer sends it: what leaves the rank, hidden or not."
    if chosen.run.layout.world_size == 1:
        note = "One rank sends nothing."
    elif not rows:
        note = "Counted message by message for layouts that ultrascale trains; time of a step above has every trainer's."
    return {
        "note": note, "rank": rank,
        "rows": [
            {"axis": row.axis, "kind": row.kind, "group": f"{row.group:,}", "over": row.over, "count": f"{row.count:,}",
             **number(row.num_bytes, format_bytes)}
            for row in rows
        ],
    }  # fmt: skip


def _schedule(prediction: Prediction) -> dict[str, Any] | None:
    """The pipeline's actions as simulated, for as many micro-batches as can be drawn; None without a pipeline."""
    layout = prediction.layout
    if not 1 < layout.pp <= MOST_DRAWN_RANKS or layout.schedule not in SCHEDULES:
        return None
    count = min(prediction.num_micro_batches, DRAWN_TURNS * layout.pp)
    timeline = step_timeline(prediction, num_micro_batches=count)
    of = "" if count == prediction.num_micro_batches else f", {count} of the {prediction.num_micro_batches} micro-batches"
    about = timeline.to_json()
    return {
        "title": f"{layout.schedule} on {layout.pp} ranks{of}: the bubble is {timeline.bubble_fraction:.1%} of what is drawn",
        **number(timeline.step_seconds, format_seconds),
        "ranks": [
            {"rank": row["rank"], "idle": f"{row['bubble_seconds'] / timeline.step_seconds:.1%}", "kept": row["in_flight"],
             "actions": [[name, round(start, 9), round(end, 9)] for name, start, end in row["actions"]]}
            for row in about["ranks"]
        ],
    }  # fmt: skip


def _flags(chosen: RunPlan) -> dict[str, dict[str, str]]:
    """The plan as settings of every supported framework: `text`, or `lacks`, the reason why it cannot run it."""
    flags: dict[str, dict[str, str]] = {}
    names = [name for name in ("megatron", "torchtitan", "nanotron", "deepspeed") if stack_file(name).writes in WRITERS]
    for name in dict.fromkeys([chosen.stack.name, *names]):
        if name == "ultrascale":
            continue
        stack = chosen.stack if name == chosen.stack.name else STACKS[name]
        try:
            flags[name] = {"text": trainer_flags(workload_of(chosen.run, chosen.cluster, stack), chosen.run.layout)}
        except SpecError as error:
            flags[name] = {"lacks": "\n".join(f"{problem.key}: {problem.rule}. {problem.remedy}" for problem in error.problems)}
    return flags
