"""ZeRO over ranks that do not divide a rank's experts, such as more of them: it cuts their rows
(`work.sharding.places.zero_shape`), and every number is that of one process, in float64, to 1e-11."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from exact.test_layouts import run_of

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.check.prove import Case, prove_all, shrink_model
from ultrascale.description.architecture.model import Model
from ultrascale.description.run import Run
from ultrascale.work.sharding.places import zero_shape

LIMIT = 1e-11
MIXTRAL, DEEPSEEK, GPT_OSS = (shrink_model(preset(name)) for name in ("tiny-mixtral", "tiny-deepseek-v3", "tiny-gpt-oss"))


def few(model: Model, experts: int) -> Model:
    return replace(model, num_experts=experts, num_experts_per_tok=min(2, experts), n_group=1, topk_group=1)


def case_of(name: str, model: Model, optimizer: Any = "adamw", count: int = 2, **layout: Any) -> Case:
    run = run_of(model, **({"dp": 1} | layout))
    batch = replace(run.batch, sequences_per_batch=count * run.layout.dp * run.layout.micro_batch_size)
    optimizing = replace(run.optimizer, name=optimizer)
    run = replace(run, batch=batch, layout=replace(run.layout, precision="fp64"), device="cpu", optimizer=optimizing)
    assert shards_rows(run), name
    return Case(name, run)


def shards_rows(run: Run) -> bool:
    """Whether ranks hold rows of experts."""
    shape = (run.model.num_experts // run.layout.ep, 2, 2)
    return zero_shape(shape, run.layout.expert_shard_size) != shape


TWO, THREE, FIVE = few(MIXTRAL, 2), few(MIXTRAL, 3), few(MIXTRAL, 5)
CASES = [
    *(case_of(f"2 experts, ZeRO {stage}", TWO, dp=4, zero_stage=stage) for stage in (1, 2, 3)),
    case_of("5 experts, ZeRO 3", FIVE, dp=4, zero_stage=3, count=1),
    case_of("hybrid", THREE, dp=4, dp_shard=2, zero_stage=2),
    case_of("recomputed", THREE, dp=4, zero_stage=3, recompute="full"),
    case_of("selective", THREE, dp=4, zero_stage=3, recompute="selective"),
    case_of("biases, two blocks a bucket", few(GPT_OSS, 3), dp=4, zero_stage=3, layers_per_bucket=2),
    case_of("ep", TWO, dp=4, ep=2, zero_stage=3),
    case_of("tp", THREE, dp=2, tp=2, zero_stage=3),
    case_of("tp, sequences whole", THREE, dp=2, tp=2, zero_stage=1, sequence_parallel=False),
    case_of("expert_tp", THREE, dp=2, tp=2, expert_tp=2, zero_stage=2),
    case_of("expert_tp and biases", few(GPT_OSS, 3), dp=2, tp=2, expert_tp=2, zero_stage=3),
    case_of("cp, balanced", few(DEEPSEEK, 3), dp=2, cp=2, zero_stage=3),
    case_of("pp", THREE, dp=2, pp=2, zero_stage=1),
    case_of("pp, ZB-V", THREE, dp=2, pp=2, zero_stage=2, schedule="zb-v", virtual_stages=2),
    case_of("Muon", THREE, "muon", dp=4, zero_stage=3),
    case_of("Muon, ep", TWO, "muon", dp=4, ep=2, zero_stage=2),
    case_of("Muon, tp", THREE, "muon", dp=2, tp=2, zero_stage=1),
    case_of("Muon, expert_tp", THREE, "muon", dp=2, tp=2, expert_tp=2, zero_stage=3),
    case_of("offloaded", THREE, dp=4, zero_stage=3, offload_optimizer=True),
]  # fmt: skip


FEW = [CASES[number] for number in (2, 4, 8, 12, 15, 18)]


@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES, marks=pytest.mark.nightly)], ids=["a few", "all"])
def test_rows_of_experts_cut_over_ranks_compute_what_one_process_does(cases):
    worst = {v.case: max(d.error for d in v.worst.values()) for v in prove_all(cases, steps=2, go_on=True)}
    assert {case: error for case, error in worst.items() if not error <= LIMIT} == {}
