"""Columns of memory against the replay, over the whole space of layouts and every family; and what more of something costs.

Columns choose what a search replays. Of 200 drawn 88 in 100 are from 2 percent below the replay to 5 above, the lowest 13
below, the highest 19 above, both with multi-token prediction beside backward passes that are cut; until what waits for W and
every rank's own recomputed blocks were counted they were 62 in 100 and 62 percent below at worst. What is still further above
or below:

    experts   that are a bucket of their own (ep, tp), reduced while the next are gathered, and gradients that I leaves
              unreduced: each is taken to be there with the rest at its most
    ends      a stage of one block beside the embedding or the head: the reduction of both is taken to be at once
    between   the fullest rank between the ends is told by its parameters, and the most of its activations by any of them
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.columns.footprint import stage_memory
from ultrascale.plan.columns.rank_loads import PASSES, PipelineShape, loads_of, loads_of_actions
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.memory.replay import plan_fullest_rank, plan_memory
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import build_schedule, enough_micro_batches

FAMILIES = (
    "llama-3-8b", "gpt2-xl", "qwen3-8b", "qwen2.5-7b", "mistral-7b", "smollm3-3b", "mixtral-8x7b", "olmoe-1b-7b",
    "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b",
)  # fmt: skip
WIDTH = ("pp", "schedule", "recompute", "tp", "cp", "ep", "zero_stage", "virtual_stages", "micro_batch_size")
"""Drawn one after the other, so that what is rare in the space is drawn as often as what is not."""
MOST_EXPERTS = 16
LOW, HIGH = -0.1, 0.15


@lru_cache(maxsize=512)
def space(name: str, layers: int, gpus: int, sequences: int, documents: bool) -> tuple[Workload, LayoutTable]:
    """All layouts of a family's model of fewer blocks, and of fewer experts, which many of these ranks could not hold."""
    model = preset(name)
    groups = {"n_group": 4, "topk_group": 2} if model.n_group > 1 else {}
    model = replace(model, num_hidden_layers=layers, num_experts=min(model.num_experts, MOST_EXPERTS), **groups)
    workload = Workload(model, parse_cluster(f"{gpus}xh100"), 4096, sequences, documents=documents)
    return workload, legal_layouts(workload).table


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Workload, Layout]:
    gpus = draw(st.sampled_from([8, 16, 32, 64]))
    asked = draw(st.sampled_from(FAMILIES)), draw(st.sampled_from([4, 6, 8, 12])), gpus
    workload, table = space(*asked, gpus * draw(st.sampled_from([2, 4])), draw(st.booleans()))
    left = np.ones(len(table), dtype=bool)
    for name in WIDTH:
        column = getattr(table, name)
        left &= column == draw(st.sampled_from(np.unique(column[left]).tolist()))
    return workload, table.layout(int(draw(st.sampled_from(np.flatnonzero(left).tolist()))))


def columns(workload: Workload, layout: Layout) -> float:
    return float(stage_memory(workload, LayoutTable.of([layout])).row(0).allocated)


def replayed(workload: Workload, layout: Layout) -> int:
    return plan_fullest_rank(
        workload.model, layout, sequence_length=workload.sequence_length, sequences_per_batch=workload.sequences_per_batch,
        documents=workload.documents, stack=workload.stack, optimizer=workload.stack.optimizer,
    ).peak.total  # fmt: skip


def check(drawn: tuple[Workload, Layout]) -> None:
    off = columns(*drawn) / replayed(*drawn) - 1
    assert LOW < off < HIGH, (off, drawn[0].model.name, drawn[1])


@given(drawn=layouts())
@settings(max_examples=30, deadline=None)
def test_columns_are_near_the_replay_of_any_layout(drawn: tuple[Workload, Layout]) -> None:
    check(drawn)


@pytest.mark.nightly
@given(drawn=layouts())
@settings(max_examples=300, deadline=None)
def test_columns_are_near_the_replay_of_many_layouts(drawn: tuple[Workload, Layout]) -> None:
    check(drawn)


def drawn_of(schedule: str, count: int) -> list[tuple[float, str]]:
    """How far columns are from the replay of as many layouts of a schedule, which a search may leave out."""
    draw, found = np.random.default_rng(1), []
    for number in range(count):
        workload, _ = space(FAMILIES[number % len(FAMILIES)], 16, 8, 16, False)
        pp, tp, size, dp = (int(draw.choice(some)) for some in ([2, 4, 8], [1, 2], [1, 2], [1, 2, 4, 8]))
        ep = int(draw.choice([1, 2])) if workload.model.num_experts and dp * tp > 1 else 1
        layout = Layout(
            dp=dp, tp=tp, pp=pp, ep=ep, micro_batch_size=size, precision="bf16", recompute=str(draw.choice(["none", "full"])),  # type: ignore[arg-type]
            schedule=schedule, virtual_stages=SCHEDULES[schedule].virtual_stages or 2,
            zero_stage=int(draw.choice([0, 1, 2, 3])) if dp > 1 else 0,  # type: ignore[arg-type]
        )  # fmt: skip
        sequences = dp * size * pp * int(draw.choice([2, 4]))
        cluster = parse_cluster(f"{layout.world_size}xh100")
        asked = replace(workload, cluster=cluster, sequences_per_batch=sequences)
        found.append((columns(asked, layout) / replayed(asked, layout) - 1, f"{workload.model.name} {layout}"))
    return sorted(found)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe-v", "dualpipe"])
def test_of_each_schedule_nine_in_ten_are_within_two_percent_below_and_five_above(schedule: str) -> None:
    found = drawn_of(schedule, 48)
    assert np.mean([-0.02 <= off <= 0.05 for off, _ in found]) >= 0.9, (found[:3], found[-3:])
    assert found[0][0] > LOW and found[-1][0] < HIGH, (found[0], found[-1])


BF16 = Layout(precision="bf16")
RANKS = {
    "a stage that is the head alone keeps a gradient of its weight for each micro-batch, all forward first":
        ("llama-3.2-1b", 32, replace(BF16, tp=2, pp=8, schedule="afab", recompute="full")),
    "so does one of the stages of a rank":
        ("llama-3.2-1b", 32, replace(BF16, tp=2, pp=4, schedule="breadth-first", virtual_stages=4, recompute="full")),
    "where micro-batches come in at both ends most waits for W in the middle":
        ("qwen2.5-7b", 16, replace(BF16, tp=2, pp=8, schedule="dualpipe", recompute="full", micro_batch_size=1)),
    "gradients of experts are I's":
        ("qwen3-30b-a3b", 64, replace(BF16, dp=4, tp=8, pp=4, ep=8, zero_stage=1, schedule="zb-h1", micro_batch_size=4)),
    "those of a head alone too":
        ("llama-3.2-1b", 32, replace(BF16, dp=2, cp=2, pp=8, zero_stage=1, schedule="zb-h1", micro_batch_size=2)),
}  # fmt: skip


@pytest.mark.parametrize("what", RANKS)
def test_every_sort_of_rank_is_near_its_replay(what: str) -> None:
    name, sequences, layout = RANKS[what]
    workload = Workload(preset(name), parse_cluster(f"{layout.world_size}xh100"), 8192, sequences)
    first, *between, last = [
        plan_memory(
            workload.model, layout, sequence_length=workload.sequence_length, sequences_per_batch=sequences,
            rank=rank * layout.world_size // layout.pp, stack=workload.stack,
        ).peak.total
        for rank in range(layout.pp)
    ]  # fmt: skip
    found = stage_memory(workload, LayoutTable.of([layout])).by_rank[:, 0]
    off = [one / other - 1 for one, other in zip(found, (first, max(between), last), strict=True)]
    assert min(off) > -0.03 and max(off) < 0.2, off


def test_most_layouts_are_within_five_percent() -> None:
    """Of a fixed draw, so that it does not get worse by and by."""
    draw, found = np.random.default_rng(0), []
    for number in range(60):
        workload, table = space(FAMILIES[number % len(FAMILIES)], 8, 32, 64, False)
        left = np.ones(len(table), dtype=bool)
        for name in WIDTH:
            column = getattr(table, name)
            left &= column == draw.choice(np.unique(column[left]))
        layout = table.layout(int(draw.choice(np.flatnonzero(left))))
        found.append((columns(workload, layout) / replayed(workload, layout) - 1, str(workload.model.name), layout))
    near = np.array([-0.02 <= off <= 0.05 for off, _, _ in found])
    assert near.mean() > 0.75, [round(one[0], 3) for one in sorted(found, key=lambda one: one[0])]


@given(drawn=layouts())
@settings(max_examples=15, deadline=None)
def test_more_recomputed_needs_no_more_memory(drawn: tuple[Workload, Layout]) -> None:
    """What is printed. Half a percent: recomputation runs to the last operation that saves, a gather more."""
    workload, layout = drawn
    assume(not (layout.pp > 1 and layout.schedule in ("zb-h1", "zb-v", "dualpipe-v")))
    none, full = (replayed(workload, replace(layout, recompute=way)) for way in ("none", "full"))
    assert full <= none * 1.005, layout


@given(drawn=layouts())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_state_that_is_cut_over_more_ranks_needs_no_more_memory(drawn: tuple[Workload, Layout]) -> None:
    workload, layout = drawn
    assume(layout.zero_stage > 0 and layout.dp % 4 == 0)
    few, all_ranks = (replayed(workload, replace(layout, dp_shard=shard)) for shard in (2, None))
    assert all_ranks <= few * 1.005, layout


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "dualpipe"])
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_few_micro_batches_hold_what_many_do(name: str, pp: int) -> None:
    """`enough_micro_batches`."""
    virtual = {"interleaved": 3, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)
    told = virtual if name == "interleaved" else None
    weights = np.array([[3.0], [7.0], [1.0], [2.0], [1.0], [1.0], [1.0], [0.1], [0.3], [9.0], [1.0], [0.0]])
    for many in (12 * pp, 12 * pp + 2):
        few = enough_micro_batches(name, pp, many)
        pipeline = PipelineShape(name, pp, virtual, few, (2,) * (pp * virtual), (0,) * (2 * pp * virtual), 1)
        whole = loads_of_actions(build_schedule(name, pp, many, told), pipeline).most(weights).max(axis=1)
        assert few < many
        assert np.array_equal(loads_of(pipeline).most(weights).max(axis=1), whole), PASSES
