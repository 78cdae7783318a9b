"""What `plan` prints of a layout is the replay of its step, pipelines, experts and other trainers included."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.cli.main import main
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.replay import plan_fullest_rank, plan_memory
from ultrascale.plan.search.replayed import CATEGORIES, with_replay
from ultrascale.plan.search.search import distinct, search
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload

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


@pytest.mark.parametrize("stack", ["megatron", "nanotron", "deepspeed", "torchtitan", "transformers", "automodel"])
@pytest.mark.parametrize("asked", [SMALL, EXPERTS], ids=["zb-v", "experts"])
def test_other_trainers_are_replayed_too_and_nothing_is_left_behind(stack: str, asked: tuple) -> None:
    name, length, sequences, layout = asked
    found = with_replay(predict(workload(name, length, sequences, layout, stack), layout)).replay
    assert found is not None
    labels = found.between_steps.by_label.items()
    assert sum(num_bytes for (part, _), num_bytes in labels if part in ("activations", "temporary", "communication")) == 0
    assert found.peak.total > found.between_steps.total


def held(stack: Stack, layout: Layout, model: Model, sequences: int) -> dict[str, int]:
    """Bytes by category before the update of a step."""
    asked = {"sequence_length": 512, "sequences_per_batch": sequences, "stack": stack, "optimizer": stack.optimizer}
    return plan_memory(model, layout, **asked).before_update.by_category


def test_state_is_as_wide_as_each_trainer_says() -> None:
    """Bytes a parameter: Megatron 2 + 4 whole, 12/dp; DeepSpeed gradients of 2, nanotron two; made in bf16 2, 2, 4."""
    model, dp = replace(preset("llama-3.2-1b"), num_hidden_layers=2, tie_word_embeddings=False, vocab_size=1024), 4
    layout = Layout(dp=dp, zero_stage=1, precision="bf16")
    count = num_parameters(model)
    for name, weights, gradients, optimizer in (
        ("megatron", 2, 4, 12 / dp), ("deepspeed", 2, 2, 12 / dp), ("nanotron", 2, 4 + 2, 12 / dp),
        ("automodel", 2 / dp, 2 / dp, 4 / dp),
    ):  # fmt: skip
        found = held(STACKS[name], layout, model, 8)
        told = [found[part] / count for part in ("parameters", "gradients", "optimizer")]
        assert told == pytest.approx([weights, gradients, optimizer], rel=0.01), name


def test_gradients_stay_whole_while_a_trainer_accumulates_them() -> None:
    """accelerate's set_requires_gradient_sync(False): no reduction before the last micro-batch, whatever the ZeRO stage."""
    layout = Layout(dp=8, zero_stage=3, precision="bf16")
    model = preset("llama-3.2-1b")
    at_once, late = (
        plan_memory(model, layout, sequence_length=512, sequences_per_batch=32,
                    stack=replace(STACKS["transformers"], shards_gradients_from=stage))
        for stage in (2, 4)
    )  # fmt: skip
    whole = 4 * num_parameters(model)
    assert late.highest_by_step[0]["gradients"] - at_once.highest_by_step[0]["gradients"] > 0.7 * whole
