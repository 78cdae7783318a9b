"""The predicted step in parts that can be measured: they sum to the step, and computing's kinds to what computing costs."""

from __future__ import annotations

from typing import Any

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.plan.flops import hardware_flops_per_token
from ultrascale.plan.report import plan_run
from ultrascale.plan.time.step_parts import parts_at, step_parts
from ultrascale.work.ops import Shape

LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-3-8b", "8xh100", {"dp": 8, "zero_stage": 3}),
    ("llama-3-8b", "8xh100", {"dp": 2, "tp": 2, "pp": 2, "recompute": "selective"}),
    ("llama-3-8b", "64xa100-80", {"dp": 4, "cp": 4, "tp": 4, "recompute": "full"}),
    ("deepseek-v3", "2048xh800", {"dp": 128, "pp": 16, "ep": 64, "schedule": "dualpipe", "zero_stage": 1}),
    ("smollm-135m", "1xh100", {}),
]


def prediction_of(model: str, cluster: str, layout: dict[str, Any]):
    run = Run(preset(model), layout=Layout(precision="bf16", **layout), batch=Batch(4096, 1024), data=Data(document_mask=False))
    found = plan_run(run, parse_cluster(cluster)).prediction
    assert found is not None
    return found


@pytest.mark.parametrize(("model", "cluster", "layout"), LAYOUTS)
def test_the_parts_sum_to_the_step(model, cluster, layout):
    prediction = prediction_of(model, cluster, layout)
    parts = step_parts(prediction)
    assert sum(parts.values()) == pytest.approx(prediction.step_seconds - prediction.waterfall["checkpoints"], rel=1e-9)
    assert all(seconds >= 0 for seconds in parts.values())


@pytest.mark.parametrize(("model", "cluster", "layout"), LAYOUTS[:3])
def test_the_kinds_of_computing_are_all_of_it(model, cluster, layout):
    """On a device that Python keeps busy nothing is left over: the kinds are priced as the sum was."""
    prediction = prediction_of(model, cluster, layout)
    parts = step_parts(prediction)
    kinds = sum(parts[name] for name in ("matrix products", "attention", "element-wise"))
    assert parts["launch gaps"] == pytest.approx(0, abs=1e-9 * prediction.step_seconds)
    assert kinds == pytest.approx(prediction.waterfall["compute"], rel=1e-9)


def test_pipelines_have_their_bubble_and_messages_in_one():
    prediction = prediction_of(*LAYOUTS[1])
    assert step_parts(prediction)["pp"] == prediction.waterfall["bubble"] + prediction.waterfall["pipeline_sends"] > 0


def test_a_bound_from_a_measured_rate_counts_the_hardware_flops():
    model, layout = preset("llama-3-8b"), Layout(tp=2, pp=2, recompute="full")
    parts = parts_at(model, layout, sequence_length=2048, tokens_per_rank=4096, flops_per_second=1e12, documents=False)
    flops = hardware_flops_per_token(model, layout, Shape(1, 2048)) * 4096 / 4
    assert sum(parts.values()) == pytest.approx(flops / 1e12)
    assert parts["recomputation"] > 0.2 * parts["matrix products"]
