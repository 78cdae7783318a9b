"""The estimate by hand against the planner, which replays every operation."""

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Run
from ultrascale.plan.estimate import estimate
from ultrascale.plan.report import plan_run

CASES = [
    ("llama-3.2-1b", "8xh100", 4096, 64, {"dp": 8, "zero_stage": 1}),
    ("llama-3-8b", "64xh100", 8192, 512, {"dp": 64, "zero_stage": 3}),
    ("llama-3-8b", "64xh100", 8192, 512, {"dp": 64, "zero_stage": 3, "recompute": "full"}),
    ("llama-3-8b", "64xh100", 8192, 512, {"dp": 32, "tp": 2, "zero_stage": 1}),
    ("llama-3-8b", "64xh100", 8192, 512, {"dp": 16, "pp": 4}),
    ("llama-2-7b", "8xh200", 4096, 256, {"dp": 8, "zero_stage": 1}),
    ("llama-2-13b", "32xa100-80", 4096, 256, {"dp": 32, "zero_stage": 3}),
    ("llama-3-70b", "256xh100", 8192, 512, {"dp": 8, "tp": 8, "pp": 4, "zero_stage": 1}),
    ("llama-3-70b", "256xh100", 8192, 512, {"dp": 256, "zero_stage": 3, "recompute": "full"}),
    ("llama-3-70b", "64xh100", 8192, 512, {"dp": 8, "tp": 8, "zero_stage": 3, "recompute": "full"}),
    ("llama-3.1-405b", "4096xh100", 8192, 2048, {"dp": 64, "tp": 8, "pp": 8, "zero_stage": 1, "recompute": "full"}),
    ("mistral-7b-v0.1", "16xa100-80", 4096, 256, {"dp": 16, "zero_stage": 2, "recompute": "full"}),
    ("qwen3-8b", "64xh100", 4096, 512, {"dp": 64, "zero_stage": 2}),
    ("qwen3-32b", "128xh200", 4096, 512, {"dp": 16, "tp": 8, "zero_stage": 1}),
    ("smollm-1.7b", "8xh100", 2048, 512, {"dp": 8}),
]


@pytest.mark.parametrize(("name", "gpus", "length", "sequences", "cut"), CASES)
def test_by_hand_memory_and_time_are_within_15_percent_of_the_planner(name, gpus, length, sequences, cut):
    layout, cluster, model = Layout(precision="bf16", **cut), parse_cluster(gpus), PRESETS[name]
    found = estimate(model, layout, cluster, sequence_length=length, sequences_per_batch=sequences)
    batch = Batch(sequence_length=length, sequences_per_batch=sequences)
    plan = plan_run(Run(model=model, layout=layout, batch=batch, cluster=gpus), cluster).to_json()
    assert found.memory_bytes == pytest.approx(plan["memory"]["peak_bytes"], rel=0.15)
    assert found.step_seconds == pytest.approx(plan["time"]["seconds_per_step"], rel=0.15)


def test_what_is_not_estimated_by_hand_is_refused():
    cluster = parse_cluster("8xh100")
    with pytest.raises(ValueError, match="only dense models"):
        estimate(PRESETS["mixtral-8x7b"], Layout(dp=8), cluster, sequence_length=4096, sequences_per_batch=8)
