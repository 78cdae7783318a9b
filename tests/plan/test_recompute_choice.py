"""recompute = "auto": the best of all choices, within the budget, and within memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.recomputed import blocks_text, modes_of
from ultrascale.description.run import Batch, Run
from ultrascale.plan.search.recompute_choice import Way, choose, frontier, ways_of_block, with_recomputation
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
    ways = [[Way(str(i), kept, seconds) for i, (kept, seconds) in enumerate(block)] for block in blocks]
    every = [(sum(w.kept_bytes for w in some), sum(w.seconds for w in some)) for some in product(*ways)]
    best = min((seconds for kept, seconds in every if kept <= budget), default=None)
    found = frontier(ways, [1] * len(ways))
    within = found.seconds[found.kept_bytes <= budget]
    assert (within[0] if len(within) else None) == best


def test_a_choice_keeps_and_costs_what_its_blocks_do() -> None:
    ways = ways_of_block(LLAMA, 0, Shape(2, 8192, "bf16", device="cuda"))
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
    ways = ways_of_block(LLAMA, 0, Shape(2, 8192, "bf16", device="cuda"))
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
    ways = {way.mode: way.seconds for way in ways_of_block(LLAMA, 0, Shape(2, 8192, "bf16", device="cuda"))}
    first, last = (sum(ways[mode] for mode in part) for part in (modes[:8], modes[-8:]))
    assert first > last


def test_compiled_blocks_are_offered_what_the_compiler_can_tell_apart() -> None:
    shape = Shape(2, 8192, "bf16", device="cuda")
    assert [way.mode for way in ways_of_block(LLAMA, 0, shape, compiled=True)] == ["none", "selective", "full"]


def test_equal_neighbours_are_told_together_and_read_back() -> None:
    modes = ("full", "selective+mlp", "selective+mlp", "none")
    assert blocks_text(modes) == ("full", "selective+mlp x 2", "none")
    assert modes_of(blocks_text(modes)) == modes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("half x 2", "none, selective or full"),
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
