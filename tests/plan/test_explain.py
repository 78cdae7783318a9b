"""Why a layout is best, against searches that answer the same question the long way."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.description.units import format_bytes, format_seconds
from ultrascale.plan.costs.cost import cost
from ultrascale.plan.intervals import FACTORS
from ultrascale.plan.search.explain import MORE_MEMORY_BYTES, binding, changes, is_bound, marginals, rungs
from ultrascale.plan.search.scaling import better_clusters
from ultrascale.plan.search.search import SearchResult, search
from ultrascale.plan.time.price import predict
from ultrascale.plan.view.search_view import MAX_FRONT, batch_words, layout_words, show_explanation, show_ranking
from ultrascale.plan.workload import Workload


@pytest.fixture(scope="module")
def result() -> SearchResult:
    workload = Workload(preset("llama-3-70b"), parse_cluster("64xh100"), 8192, 128, STACKS["ultrascale"])
    return search(workload, constraints={"cp": (1,)})


def test_each_rung_needs_no_more_memory_and_allows_no_slower_step(result: SearchResult) -> None:
    found = rungs(result)
    assert [rung.name for rung in found][:1] == ["data parallelism"] and found[-1].name == "+ pipeline"
    assert not found[0].fits and found[-1].fits
    assert [r.least_bytes for r in found] == sorted((r.least_bytes for r in found), reverse=True)
    fastest = [r.fastest_seconds for r in found if r.fastest_seconds is not None]
    assert fastest == sorted(fastest, reverse=True)
    assert [r.num_layouts for r in found] == sorted(r.num_layouts for r in found)
    assert found[-1].num_layouts == len(result.priced.table)


def test_a_rung_needs_what_its_smallest_layout_needs(result: SearchResult) -> None:
    plain = next(rung for rung in rungs(result) if rung.name == "+ recomputation")
    smallest = min(
        float(predict(result.workload, layout).memory.needed)
        for layout in (
            Layout(dp=64, zero_stage=3, precision="bf16", recompute=way, micro_batch_size=1)
            for way in ("none", "selective", "full", "every-k")
        )
    )
    assert plain.least_bytes == pytest.approx(smallest)


def test_a_rung_of_which_only_the_training_state_is_known_says_over(result: SearchResult) -> None:
    """Plain data parallelism of 70B was said to need at least 1.03 TiB, 16 bytes a parameter, where its plan says 1.2."""
    ladder = rungs(result)
    plain = ladder[0]
    needed = predict(result.workload, Layout(dp=64, precision="bf16")).memory.needed
    assert is_bound(plain, result) and float(needed) > 1.1 * plain.least_bytes
    assert not is_bound(ladder[-1], result)
    console = Console(width=200, record=True, file=io.StringIO())
    show_explanation(result, [], [], console)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert next(row for row in rows if row[:2] == ["data", "parallelism"])[3] == "over"
    assert "over" not in next(row for row in rows if row[:2] == ["+", "pipeline"])


def test_a_change_is_one_choice_and_its_price_is_the_prediction(result: SearchResult) -> None:
    best = result.best
    assert best is not None
    found = [one for one in changes(result) if one.name == "micro_batch_size"]
    assert found and str(best.layout.micro_batch_size) not in {one.value for one in found}
    for one in found:
        layout = replace(best.layout, micro_batch_size=int(one.value))
        assert one.seconds == pytest.approx(predict(result.workload, layout).step_seconds)
    names = {one.name for one in changes(result)}
    assert {"recompute", "zero_stage", "tp", "pp"} <= names
    better = [one for one in changes(result) if one.fits and one.seconds < best.step_seconds * 0.97]
    assert not better


def test_the_rest_is_kept_where_that_is_legal_and_what_is_not_is_named(result: SearchResult) -> None:
    """pp was changed together with the schedule, and ZeRO with its shards, without a word: 66 percent slower for 0."""
    result = replace(result, ranked=tuple(one for one in result.ranked if one.layout.pp > 1))
    best = result.best
    assert best is not None
    for one in changes(result):
        if one.name in ("zero_stage", "pp") and not one.also:
            layout = replace(best.layout, **{one.name: int(one.value)})
            layout = replace(layout, dp=layout.dp * best.layout.world_size // layout.world_size, dp_shard=None)
            layout = replace(layout, schedule="1f1b", virtual_stages=1) if layout.pp == 1 else layout
            assert one.seconds == pytest.approx(predict(result.workload, layout).step_seconds), one
    assert all("None" not in one.also for one in changes(result))
    plain = next(one for one in changes(result) if one.name == "pp" and one.value == "1")
    assert "schedule" not in plain.also  # without a pipeline there is none


def test_more_memory_is_worth_what_a_search_with_it_finds(result: SearchResult) -> None:
    worth = {one.name: one.gain for one in marginals(result)}
    cluster = result.workload.cluster
    accelerator = cluster.accelerator
    memory = replace(accelerator.memory_bytes, value=accelerator.memory_bytes.value + MORE_MEMORY_BYTES)
    larger = replace(cluster, node=replace(cluster.node, accelerator=replace(accelerator, memory_bytes=memory)))
    again = search(replace(result.workload, cluster=larger), constraints={"cp": (1,)})
    assert again.best is not None and result.best is not None
    gain = result.best.step_seconds / again.best.step_seconds - 1
    assert worth["10 GB more memory"] == pytest.approx(gain, abs=0.02)
    assert worth["unlimited memory"] >= worth["10 GB more memory"] - 1e-9
    assert 0.05 < worth["matrix products 20% faster"] < 0.2
    assert all(gain >= -1e-9 for gain in worth.values())


def test_what_binds_is_said_with_its_share(result: SearchResult) -> None:
    best, found = result.best, marginals(result)
    assert best is not None
    share = best.waterfall["compute"] / best.step_seconds
    assert f"compute is {share:.0%} of the step" in binding(best, found)
    endless = next(one for one in found if one.name == "unlimited memory")
    loose = [replace(one, gain=0.0) for one in found]
    assert binding(best, loose).startswith("Memory does not bind")
    little = binding(best, [replace(endless, gain=0.03)])
    assert little.startswith("Memory binds little: without its limit a step would be 3% faster;")
    assert binding(best, [replace(endless, gain=0.25)]).startswith("Memory binds: without its limit a step would be 25% faster")


def test_the_batch_is_told_as_a_product(result: SearchResult) -> None:
    workload = result.workload
    one = predict(workload, Layout(dp=8, tp=8, micro_batch_size=2, zero_stage=1, precision="bf16"))
    assert batch_words(one).startswith("128 sequences (1.05M tokens) = dp 8 x micro-batch 2 x 8 micro-batches")


def test_a_layout_is_a_line() -> None:
    layout = Layout(dp=4, tp=8, pp=2, schedule="interleaved", virtual_stages=5, zero_stage=1, dp_shard=2, recompute="full")
    assert layout_words(layout, 16) == "dp4 tp8 pp2 interleaved x5, ZeRO 1/2, 1 x 16, full"
    assert layout_words(Layout(), 1) == "one GPU, ZeRO 0, 1 x 1"


def test_a_training_costs_hours_energy_and_money() -> None:
    cluster = parse_cluster("64xh100")
    assert cluster.accelerator.watts is not None and cluster.accelerator.dollars_per_hour is not None
    day = cost(cluster, 86400, num_gpus=64)
    assert day.gpu_hours == 64 * 24
    assert day.kilowatt_hours == pytest.approx(64 * 24 * 10.2 / 8)  # a DGX H100 draws 10.2 kW at most
    assert day.dollars == pytest.approx(64 * 24 * cluster.accelerator.dollars_per_hour.value)
    assert "MWh" in day.words and "$" in day.words


def test_the_front_of_time_and_memory_is_told_from_end_to_end(result: SearchResult) -> None:
    console = Console(width=100, record=True, force_terminal=False)
    show_explanation(result, [], [], console)
    lines = console.export_text().split("Time against memory", 1)[1].splitlines()[2:]
    ends = [result.front[0], result.front[-1]]
    for line, one in zip((lines[0], lines[MAX_FRONT - 1]), ends, strict=True):
        assert line.split()[:2] == format_seconds(one.step_seconds).split()
        assert format_bytes(float(one.memory.needed)) in line
    assert f"{len(result.front) - MAX_FRONT} more between them" in lines[MAX_FRONT]


def test_explained_times_are_those_of_the_ranking_where_a_schedule_pairs_passes() -> None:
    workload = Workload(preset("mixtral-8x7b"), parse_cluster("64xh100"), 4096, 512, STACKS["ultrascale"])
    found = search(workload, constraints={"cp": (1,), "schedule": ("dualpipe-v",), "pp": (2, 4)})
    for one in found.front:
        assert one.step_seconds == pytest.approx(predict(workload, one.layout).step_seconds)
    assert found.front[0].step_seconds <= min(one.step_seconds for one in found.ranked)
    assert rungs(found)[-1].fastest_seconds == pytest.approx(found.front[0].step_seconds, rel=0.005)
    other, best = better_clusters(workload, constraints={"cp": (1,)})[0]
    alone = search(replace(workload, cluster=other), constraints={"cp": (1,)}).best
    assert alone is not None and best.step_seconds == pytest.approx(alone.step_seconds)


def test_a_ranking_says_how_far_its_times_may_be_off(result: SearchResult) -> None:
    console = Console(width=100, record=True, force_terminal=False)
    show_ranking(result, console, top=3)
    low, high = FACTORS["dense"]
    assert f"step: 80% prediction interval, {low:.2f} to {high:.2f} of it." in console.export_text()


def test_reasons_change_nothing_of_the_search_that_they_are_of():
    result = search(Workload(preset("llama-3-8b"), parse_cluster("16xh100"), 4096, 64, STACKS["ultrascale"]))
    before = int(result.priced.was_priced.sum()), result.priced.num_unfit
    assert result.priced.too_slow.any()
    assert rungs(result) == rungs(result) and marginals(result) == marginals(result)
    assert (int(result.priced.was_priced.sum()), result.priced.num_unfit) == before
