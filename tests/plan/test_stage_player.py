"""Passes of stages and blocks that are applied from records: the same bytes, messages and FLOPs as passes replayed singly."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plan.test_columns import layouts

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.memory import replay as memory
from ultrascale.plan.memory.replay import MemoryPlan, plan_fullest_rank, plan_memory
from ultrascale.plan.memory.stage_player import RecordedPasses
from ultrascale.plan.workload import Workload

MODELS = ("tiny-llama", "tiny-qwen3", "tiny-mixtral", "tiny-deepseek-v3", "tiny-gpt2", "tiny-olmo2")
SCHEDULES = {"afab": 1, "1f1b": 1, "interleaved": 2, "breadth-first": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}

DEEP = replace(preset("tiny-llama"), num_hidden_layers=12)
POST = replace(preset("tiny-olmo2"), num_hidden_layers=8)
"""Norms after the products: W reads the stage's input, which its I has let go."""


@st.composite
def pipelines(draw) -> tuple[Model, Layout, dict[str, Any]]:
    schedule, pp, dp = draw(st.sampled_from([*SCHEDULES])), draw(st.sampled_from([2, 3])), draw(st.sampled_from([1, 2, 4]))
    layout = Layout(
        dp=dp, pp=pp, tp=draw(st.sampled_from([1, 2])), schedule=schedule, virtual_stages=SCHEDULES[schedule],
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])) if dp > 1 else 0, precision=draw(st.sampled_from(["bf16", "fp32"])),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every-k"])),
    )  # fmt: skip
    count = draw(st.sampled_from([1, 3])) * pp * 2
    asked = {"steps": draw(st.sampled_from([1, 2])), "device": draw(st.sampled_from(["cpu", "cuda"]))}
    model = preset(draw(st.sampled_from(MODELS)))
    deep = replace(model, num_hidden_layers=2 * layout.num_stages)  # stages within are alike, whoever their neighbours are
    return draw(st.sampled_from([model, deep])), layout, {"sequence_length": 64, "sequences_per_batch": count * dp, **asked}


@given(pipelines())
@settings(max_examples=60, deadline=None)
@example((DEEP, Layout(pp=3, schedule="zb-v", virtual_stages=2), {"sequence_length": 64, "sequences_per_batch": 18}))
@example((POST, Layout(pp=4, schedule="zb-h1", recompute="full"), {"sequence_length": 64, "sequences_per_batch": 32}))
@example((POST, Layout(pp=2, schedule="zb-v", virtual_stages=2), {"sequence_length": 64, "sequences_per_batch": 16}))
def test_what_is_played_is_what_is_replayed(drawn: tuple[Model, Layout, dict[str, Any]]) -> None:
    model, layout, asked = drawn
    if layout.num_stages > model.num_hidden_layers:
        return
    passes = RecordedPasses()  # what ranks before have written down
    for rank in range(0, layout.world_size, layout.world_size // layout.pp):
        plan = partial(plan_memory, model, layout, rank=rank, **asked)
        with_player = plan(passes=passes)
        player, memory.StagePlayer = memory.StagePlayer, lambda stage, entries: stage  # type: ignore[assignment]
        try:
            assert facts(with_player) == facts(plan())
        finally:
            memory.StagePlayer = player


@st.composite
def deep_models(draw) -> tuple[Model, Layout, dict[str, Any]]:
    dp, pp, schedule = (draw(st.sampled_from(some)) for some in ([1, 2, 4], [1, 1, 2], ["1f1b", "zb-h1", "zb-v", "dualpipe-v"]))
    layout = Layout(
        dp=dp, pp=pp, schedule=schedule, virtual_stages=SCHEDULES[schedule] if pp > 1 else 1,
        tp=draw(st.sampled_from([1, 2])), zero_stage=draw(st.sampled_from([0, 1, 2, 3])) if dp > 1 else 0,
        dp_shard=draw(st.sampled_from([None, 2])) if dp > 2 else None, precision=draw(st.sampled_from(["bf16", "fp32"])),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every-k"])),
        layers_per_bucket=draw(st.sampled_from([1, 1, 2])),
    )  # fmt: skip
    if layout.zero_stage == 0:
        layout = replace(layout, dp_shard=None)
    steps, device, stack = (draw(st.sampled_from(some)) for some in ([1, 2], ["cpu", "cuda"], ["ultrascale", "torchtitan"]))
    rank = draw(st.sampled_from([0, layout.world_size - 1]))
    asked = {"steps": steps, "device": device, "stack": STACKS[stack], "documents": draw(st.booleans()), "rank": rank}
    name = draw(st.sampled_from((*MODELS, "tiny-gpt-oss", "tiny-smollm3")))  # blocks in turns: windowed, without rotations
    model = replace(preset(name), num_hidden_layers=draw(st.sampled_from([6, 9])) * layout.num_stages)
    sequences = draw(st.sampled_from([1, 2, 4])) * layout.num_stages * dp
    return model, layout, {"sequence_length": 128, "sequences_per_batch": sequences, **asked}


TWO_A_BUCKET = Layout(
    dp=2, tp=2, pp=2, schedule="dualpipe-v", virtual_stages=2, zero_stage=0, precision="bf16", layers_per_bucket=2
)
"""I leaves gradients of norms in a bucket beside cast ones, which its other block finds."""


NARROW = replace(preset("tiny-llama"), num_hidden_layers=20, intermediate_size=64, vocab_size=256)
"""What W gathers of a block, or of the head, counts beside those that follow."""


@given(deep_models())
@settings(max_examples=60, deadline=None)
@example(
    (
        NARROW,
        Layout(tp=4, pp=2, schedule="zb-v", virtual_stages=2, precision="bf16"),
        {"sequence_length": 64, "sequences_per_batch": 8, "rank": 4},
    )
)
@example((
    replace(preset("tiny-llama"), num_hidden_layers=20), TWO_A_BUCKET,
    {"sequence_length": 64, "sequences_per_batch": 16, "stack": STACKS["transformers"], "rank": 4},
))  # fmt: skip
def test_passes_of_deep_models_are_as_if_replayed_one_by_one(drawn: tuple[Model, Layout, dict[str, Any]]) -> None:
    model, layout, asked = drawn
    expect_as_one_by_one(model, layout, **asked)


@given(
    layouts(), st.sampled_from([*STACKS]), st.sampled_from([1, 2]), st.sampled_from(["bf16", "fp8"]), st.integers(0, 1 << 16)
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_so_are_those_of_every_family_in_the_whole_space(
    drawn: tuple[Workload, Layout], stack: str, per_bucket: int, precision: str, rank: int
) -> None:
    workload, layout = drawn
    layout = replace(layout, precision=precision, layers_per_bucket=per_bucket if layout.dp * layout.cp > 1 else 1)
    expect_as_one_by_one(
        workload.model, layout, sequence_length=workload.sequence_length, sequences_per_batch=workload.sequences_per_batch,
        documents=workload.documents, stack=STACKS[stack], rank=rank % layout.world_size,
    )  # fmt: skip


def expect_as_one_by_one(model: Model, layout: Layout, **asked: Any) -> None:
    """A timeline notes every operation, so that a replay with one applies no records."""
    played, one_by_one = (facts(plan_memory(model, layout, keeps_timeline=plain, **asked)) for plain in (False, True))
    assert played | {"timeline": []} == one_by_one | {"timeline": []}


def facts(plan: MemoryPlan) -> dict[str, Any]:
    """All that a replay says, its tally as numbers."""
    found = {field.name: getattr(plan, field.name) for field in fields(plan)}
    tally = found.pop("tally")
    return found | {"products": tally.products, "attention": tally.attention, "traffic": tally.traffic}


@given(pipelines())
@settings(max_examples=30, deadline=None)
def test_the_fullest_rank_is_among_those_that_are_replayed(drawn: tuple[Model, Layout, dict[str, Any]]) -> None:
    model, layout, asked = drawn
    if layout.num_stages > model.num_hidden_layers:
        return
    ranks = range(0, layout.world_size, layout.world_size // layout.pp)
    every = [plan_memory(model, layout, rank=rank, **asked).peak.total for rank in ranks]
    assert plan_fullest_rank(model, layout, **asked).peak.total >= 0.99 * max(every)
