"""The predicted step as a picture and as a trace: its pipeline simulated with the plan's prices, and the time after it.

Communication and loads that passes do not hide, the optimizer and the rest are drawn after the pipeline, on all ranks, so that
the picture is as long as the step. Where in the step some of it really occurs, the prices do not determine.
"""

from __future__ import annotations

import json

from ultrascale.description.problems import mistake
from ultrascale.output_file import write_output
from ultrascale.plan.pipeline.pipelined import stage_seconds
from ultrascale.plan.pipeline.play import Timeline, simulate
from ultrascale.plan.report import RunPlan
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.view.draw_schedule import draw_svg
from ultrascale.plan.view.trace_events import trace_events
from ultrascale.schedules.build import build_schedule

DRAWN_PER_RANK = 4
"""Micro-batches drawn per rank of the pipeline: enough to see the pipeline fill, run and drain."""
AFTER = {
    "data_parallel": "dp, exposed", "offload": "offload to host", "optimizer": "optimizer", "data": "reading data",
    "checkpoints": "checkpoints", "rest": "rest",
}  # fmt: skip
"""Parts of the waterfall outside passes, in the order in which they are drawn."""
SLOWED = "passes slowed by traffic"


def write_step(plan: RunPlan, *, svg: str | None, perfetto: str | None) -> None:
    """Write the requested picture and trace. Raises SpecError if there is no predicted time."""
    prediction = plan.prediction
    if prediction is None:
        rule = f"needs the speed of {plan.cluster.accelerator.title}, which is measured at run time"
        raise mistake("svg" if svg else "perfetto", rule, "Plan for a catalogued accelerator.")
    count = prediction.num_micro_batches
    title = f"{plan.run.model.name or plan.run.model.model_type}, {prediction.layout.schedule}"
    whole = step_timeline(prediction)
    after = seconds_after(prediction, whole)
    if svg is not None:
        drawn = min(count, DRAWN_PER_RANK * prediction.layout.pp)
        part = "" if drawn == count else f", {drawn} of {count} micro-batches"
        unit = "" if drawn == count else "s for those that are drawn"
        timeline = whole if drawn == count else step_timeline(prediction, num_micro_batches=drawn)
        write_output(svg, draw_svg(timeline, title=title + part, unit=unit, after=after))
    if perfetto is not None:
        write_output(perfetto, json.dumps(trace_events(whole, title=title, after=after)))


def step_timeline(prediction: Prediction, *, num_micro_batches: int | None = None) -> Timeline:
    """Pipeline of a step in seconds, with `num_micro_batches` of its micro-batches or all, simulated action by action."""
    layout = prediction.layout
    count = num_micro_batches or prediction.num_micro_batches
    schedule = build_schedule(layout.schedule, layout.pp, count, layout.virtual_stages)
    return simulate(schedule, stage_seconds(prediction.workload, layout))


def seconds_after(prediction: Prediction, whole: Timeline) -> dict[str, float]:
    """Seconds of a step beyond its pipeline `whole`, by name: parts after it, and slowdowns of the pipeline."""
    parts = {name: prediction.waterfall[part] for part, name in AFTER.items() if prediction.waterfall[part] > 0}
    slowed = prediction.step_seconds - whole.step_seconds - sum(parts.values())
    return {SLOWED: slowed, **parts} if slowed > 1e-6 * prediction.step_seconds else parts
