"""recompute = "auto": the best of all choices, within the budget, and within memory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import Cluster, Sourced, parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.recomputed import blocks_text, modes_of
from ultrascale.description.run import Batch, Data, Run
from ultrascale.plan.columns.footprint import MARGIN
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.report import RunPlan, plan_run
from ultrascale.plan.search.recompute_choice import RecomputeOption, choose, frontier, recompute_options, with_recomputation
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.work import Shape

LLAMA = Workload(PRESETS["llama-3-8b"], parse_cluster("8xh100"), 8192, 64)
ASKED = Layout(dp=8, zero_stage=3, precision="bf16", micro_batch_size=2, recompute="auto")


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    blocks=st.lists(
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4), min_size=1, max_size=4
    ),
    budget=st.integers(0, 200),
)
def test_no_choice_of_all_there_are_is_faster_within_a_budget(blocks: list[list[tuple[int, int]]], budget: int) -> None:
    ways = [[RecomputeOption(str(i), kept, seconds) for i, (kept, seconds) in enumerate(block)] for block in blocks]
    every = [(sum(w.kept_bytes for w in some), sum(w.seconds for w in some)) for some in product(*ways)]
    best = min((seconds for kept, seconds in every if kept <= budget), default=None)
    found = frontier(ways, [1] * len(ways))
    within = found.seconds[found.kept_bytes <= budget]
    assert (within[0] if len(within) else None) == best


def test_a_choice_keeps_and_costs_what_its_blocks_do() -> None:
    ways = recompute_options(LLAMA, 0, Shape(2, 8192, "bf16", device="cuda"))
    found = frontier([ways] * 5, [3, 3, 2, 2, 1])
    by_mode = {way.mode: way for way in ways}
    for index in (0, len(found.seconds) // 2, len(found.seconds) - 1):
        one = found.at(index)
        chosen = [by_mode[mode] for mode in one.modes]
        assert one.kept_bytes == sum(w.kept_bytes * weight for w, weight in zip(chosen, (3, 3, 2, 2, 1), strict=True))
        assert one.seconds == pytest.approx(sum(w.seconds for w in chosen))


def test_time_never_rises_and_memory_never_falls_as_the_budget_grows() -> None:
    seconds, kept = [], []
    for budget in np.linspace(5e9, 75e9, 8):
        found = predict(LLAMA, choose(LLAMA, replace(ASKED, recompute_budget=int(budget))))
        seconds.append(found.step_seconds)
        kept.append(float(found.memory.allocated))
        assert found.memory.categories["activations"] <= budget + 8e9  # and what the block at work needs
    assert seconds == sorted(seconds, reverse=True) and kept == sorted(kept)
    assert seconds[0] > 1.15 * seconds[-1]


def test_without_limit_nothing_is_computed_again_and_with_the_least_budget_everything() -> None:
    ways = recompute_options(LLAMA, 0, Shape(2, 8192, "bf16", device="cuda"))
    assert choose(LLAMA, ASKED).recompute_blocks == ("none x 32",)
    least = 32 * ways[-1].kept_bytes
    assert choose(LLAMA, replace(ASKED, recompute_budget=least)).recompute_blocks == ("full x 32",)
    with pytest.raises(SpecError, match=f"Give {least} or more"):
        choose(LLAMA, replace(ASKED, recompute_budget=least - 1))


def test_what_is_chosen_for_a_device_fits_it_and_is_faster_than_any_plain_way_that_does() -> None:
    run = Run(PRESETS["llama-3-8b"], layout=ASKED, batch=Batch(8192, 64))
    chosen = with_recomputation(run, LLAMA.cluster).layout
    found = predict(LLAMA, chosen)
    assert found.memory.fits and chosen.recompute == "blocks"
    plain = [predict(LLAMA, replace(ASKED, recompute=way)) for way in ("none", "selective", "full")]
    assert not plain[0].memory.fits
    assert found.step_seconds < min(one.step_seconds for one in plain if one.memory.fits)


def test_ranks_of_a_pipeline_that_keep_more_micro_batches_compute_more_again() -> None:
    run = Run(PRESETS["llama-3-8b"], layout=replace(ASKED, pp=4, dp=2, zero_stage=1), batch=Batch(8192, 64))
    modes = modes_of(with_recomputation(run, LLAMA.cluster).layout.recompute_blocks)
    ways = {way.mode: way.seconds for way in recompute_options(LLAMA, 0, Shape(2, 8192, "bf16", device="cuda"))}
    first, last = (sum(ways[mode] for mode in part) for part in (modes[:8], modes[-8:]))
    assert first > last


FAMILIES = ("llama-3-8b", "gpt2-xl", "smollm3-3b", "qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b")


@lru_cache(maxsize=32)
def layouts_of(name: str) -> LayoutTable:
    model = replace(PRESETS[name], num_hidden_layers=8, num_experts=min(PRESETS[name].num_experts, 16))
    return legal_layouts(Workload(model, parse_cluster("8xh100"), 4096, 16), constraints={"recompute": ("none",)}).table


@st.composite
def runs(draw: st.DrawFn) -> Run:
    name = draw(st.sampled_from(FAMILIES))
    table = layouts_of(name)
    left = np.ones(len(table), dtype=bool)
    for axis in ("pp", "schedule", "tp", "ep", "zero_stage", "micro_batch_size"):
        column = getattr(table, axis)
        left &= column == draw(st.sampled_from(np.unique(column[left]).tolist()))
    layout = table.layout(int(draw(st.sampled_from(np.flatnonzero(left).tolist()))))
    model = replace(PRESETS[name], num_hidden_layers=8, num_experts=min(PRESETS[name].num_experts, 16))
    return Run(model, layout=layout, batch=Batch(4096, 16), data=Data(document_mask=False))


@settings(max_examples=20, deadline=None)
@given(run=runs(), share=st.floats(0, 1))
def test_what_is_chosen_is_what_a_plan_calls_fitting_and_no_plain_way_that_fits_is_faster(run: Run, share: float) -> None:
    """On a device between what the smallest of the plain ways needs and what the largest does."""

    def planned(way: Any, cluster: Cluster) -> RunPlan:
        return plan_run(replace(run, layout=replace(run.layout, recompute=way)), cluster)

    cluster = parse_cluster("8xh100")
    ways = ("none", "selective", "full")
    least, most = min(needs := [planned(way, cluster).needed_bytes for way in ways]), max(needs)
    capacity = Sourced(round((least + share * (most - least)) / (1 - MARGIN)) + 1, "a test", "now")
    tight = replace(cluster.accelerator, memory_bytes=capacity)
    cluster = replace(cluster, node=replace(cluster.node, accelerator=tight))
    plain = [plan for plan in (planned(way, cluster) for way in ways) if plan.fits]
    chosen = planned("auto", cluster)
    assert plain and chosen.fits, chosen.headroom_bytes
    seconds = [plan.prediction.step_seconds for plan in (chosen, *plain) if plan.prediction is not None]
    assert seconds[0] <= min(seconds) * (1 + 1e-9)


def test_compiled_blocks_are_offered_what_the_compiler_can_tell_apart() -> None:
    shape = Shape(2, 8192, "bf16", device="cuda")
    assert [way.mode for way in recompute_options(LLAMA, 0, shape, compiled=True)] == ["none", "selective", "full"]


def test_equal_neighbours_are_told_together_and_read_back() -> None:
    modes = ("full", "selective+mlp", "selective+mlp", "none")
    assert blocks_text(modes) == ("full", "selective+mlp x 2", "none")
    assert modes_of(blocks_text(modes)) == modes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("half x 2", "neither none, selective, full nor a module"),
        ("full+mlp", "only selective"),
        ("selective+norm", "there are qkv"),
        ("none x 0", "number"),
    ],
)  # fmt: skip
def test_what_is_no_way_to_recompute_is_told(text: str, told: str) -> None:
    (problem,) = Layout(recompute="blocks", recompute_blocks=(text,)).problems()
    assert problem.key == "layout.recompute_blocks" and told in problem.rule


def test_a_budget_without_auto_and_blocks_without_a_way_are_mistakes() -> None:
    assert [p.key for p in Layout(recompute_budget=10).problems()] == ["layout.recompute_budget"]
    assert [p.key for p in Layout(recompute="blocks").problems()] == ["layout.recompute_blocks"]
    assert [p.key for p in Layout(recompute="full", recompute_blocks=("none",)).problems()] == ["layout.recompute_blocks"]
