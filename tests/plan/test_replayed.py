"""What `plan` prints of a layout that our trainer runs is the replay of its step, pipelines and experts included."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ultrascale.cli.main import main
from ultrascale.plan.memory.replay import plan_fullest_rank, plan_memory
from ultrascale.plan.search.replayed import CATEGORIES, with_replay
from ultrascale.plan.search.search import distinct, search
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.spec.cluster import parse_cluster
from ultrascale.spec.layout import Layout
from ultrascale.spec.model_presets import preset
from ultrascale.spec.stack_files import STACKS

GIB = 2**30
# The layouts of an audit: columns say 13.3 and 40 GiB of live bytes, trace and replay 19.4 and 92.2.
SMALL = ("llama-3.2-1b", 4096, 16, Layout(
    pp=2, virtual_stages=2, schedule="zb-v", recompute="full", micro_batch_size=2, precision="bf16",
))  # fmt: skip
LARGE = ("llama-3-8b", 8192, 512, Layout(
    dp=16, tp=2, pp=2, virtual_stages=2, schedule="zb-v", recompute="full", micro_batch_size=4, zero_stage=1, precision="bf16",
))  # fmt: skip
EXPERTS = ("olmoe-1b-7b", 2048, 64, Layout(dp=4, pp=2, ep=4, zero_stage=1, recompute="full", precision="bf16"))


def workload(name: str, length: int, sequences: int, layout: Layout, stack: str = "ultrascale") -> Workload:
    return Workload(preset(name), parse_cluster(f"{layout.world_size}xh100"), length, sequences, STACKS[stack])


@pytest.mark.parametrize(("name", "length", "sequences", "layout"), [SMALL, LARGE, EXPERTS])
def test_memory_is_that_of_the_fullest_rank_replayed(name: str, length: int, sequences: int, layout: Layout) -> None:
    found = with_replay(predict(workload(name, length, sequences, layout), layout))
    ranks = range(0, layout.world_size, layout.world_size // layout.pp)
    most = max(
        plan_memory(preset(name), layout, sequence_length=length, sequences_per_batch=sequences, rank=rank).peak.total
        for rank in ranks
    )
    assert float(found.memory.allocated) == most
    assert sum(float(value) for value in found.memory.categories.values()) == pytest.approx(most)
    assert set(found.memory.categories) == set(CATEGORIES)


def test_a_layout_whose_replay_is_larger_than_the_device_does_not_fit() -> None:
    """Weights' gradients that wait between I and W are more than what full recomputation keeps: replay and columns say so."""
    name, length, sequences, layout = LARGE
    priced = predict(workload(name, length, sequences, layout), layout)
    assert not priced.memory.fits and not with_replay(priced).memory.fits


def test_the_last_rank_is_replayed_where_it_holds_as_many_blocks_as_the_first() -> None:
    """Its loss makes it the fullest: 5.99 GB against the first rank's 5.35."""
    layout = Layout(dp=4, cp=2, pp=2, zero_stage=1, recompute="selective", precision="bf16")
    model = replace(preset("mistral-7b"), num_hidden_layers=4)
    asked = {"sequence_length": 4096, "sequences_per_batch": 32, "documents": True}
    first, last = (plan_memory(model, layout, rank=rank, **asked).peak.total for rank in (0, 8))
    assert plan_fullest_rank(model, layout, **asked).peak.total == last > 1.1 * first


def test_the_plan_of_a_pipeline_says_what_its_replay_does(capsys) -> None:
    name, length, sequences, layout = SMALL
    words = [
        f"--layout.{key}={getattr(layout, key)}"
        for key in ("pp", "virtual_stages", "schedule", "recompute", "micro_batch_size")
    ]
    asked = ["--model", name, "--gpus", "2xh100", "--seq-len", str(length), "--sequences-per-batch", str(sequences)]
    main(["plan", *asked, *words, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["memory"]["peak_bytes"] / GIB == pytest.approx(19.4, abs=0.05)
    assert told["memory"]["peak_bytes"] == told["search"]["ranked"][0]["memory"]["peak_allocated_bytes"]
    assert told["memory"]["needed_bytes"] >= told["memory"]["peak_bytes"]


def test_every_layout_that_a_search_lists_is_replayed_and_fits() -> None:
    name, length, sequences, layout = LARGE
    result = search(workload(name, length, sequences, layout))
    listed = distinct(result.ranked)[:10]
    assert all(one.replay is not None and one.memory.fits for one in listed)


def test_other_trainers_keep_their_columns() -> None:
    name, length, sequences, layout = EXPERTS
    priced = predict(workload(name, length, sequences, layout, "megatron"), layout)
    assert with_replay(priced) is priced
