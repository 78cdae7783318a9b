"""Whole prices: what must hold for any layout, and what published runs took."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import Cluster, Sourced, parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS, preset
from ultrascale.catalogue.stacks.stack import with_optimizer
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.price import predict, price
from ultrascale.plan.time.stage_cut import stage_layers
from ultrascale.plan.time.stages import chunk_layers_of, partition_stages
from ultrascale.plan.view.plan_view import TIMES
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv


def on(
    gpus: str, preset: str = "llama-3-70b", *, sequences: int = 512, length: int = 8192, stack: str = "megatron"
) -> Workload:
    """With tp overlapped where the trainer can: of what shows of it a stand-in's stragglers would be a share."""
    overlaps = stack in ("megatron", "nemo") or STACKS[stack].overlaps_tensor_parallel
    return Workload(
        PRESETS[preset], parse_cluster(gpus), length, sequences, replace(STACKS[stack], overlaps_tensor_parallel=overlaps)
    )


layouts = st.builds(
    lambda tp, pp, mbs, way, zero, schedule: Layout(
        dp=64 // (tp * pp), tp=tp, pp=pp, micro_batch_size=mbs, recompute=way, zero_stage=zero, precision="bf16",
        schedule=schedule[0] if pp > 1 else "1f1b", virtual_stages=schedule[1] if pp > 1 else 1,
    ),
    st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([0, 1]), st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_the_parts_of_a_step_sum_to_it_played_or_not(layout: Layout):
    workload = on("64xh100", sequences=256)
    for found in (predict(workload, layout), price(workload, LayoutTable.of([layout])).row(0)):
        assert tuple(sorted(found.waterfall)) == tuple(sorted(TIMES))
        assert sum(found.waterfall.values()) == pytest.approx(found.step_seconds, rel=1e-9)
        assert min(found.waterfall.values()) >= 0


@settings(max_examples=25, deadline=None)
@given(layouts, st.sampled_from([0.1, 0.5, 0.9]))
def test_a_slower_network_never_makes_a_step_faster(layout: Layout, factor: float):
    workload = on("64xh100", sequences=256)
    slow = replace(workload, cluster=slower(workload.cluster, factor))
    assert predict(slow, layout).step_seconds >= predict(workload, layout).step_seconds * (1 - 1e-9)


def test_products_of_tp_beside_their_messages_make_a_step_faster_and_only_where_there_is_tp():
    workload = on("64xh100", sequences=256, stack="ultrascale")
    for tp in (1, 8):
        plain = Layout(dp=64 // tp, tp=tp, precision="bf16", recompute="selective", zero_stage=1)
        gain = predict(workload, plain).step_seconds / predict(workload, replace(plain, tp_overlap=True)).step_seconds
        assert (gain == 1) if tp == 1 else (1.005 < gain < 1.2), (tp, gain)


def slower(cluster: Cluster, factor: float) -> Cluster:
    link = cluster.node.inter_link
    assert link is not None
    rate = replace(link.bytes_per_second, value=link.bytes_per_second.value * factor)
    achieved = link.achieved_bytes_per_second
    scaled = achieved and Sourced(achieved.value * factor, achieved.source, achieved.date)
    node = replace(cluster.node, inter_link=replace(link, bytes_per_second=rate, achieved_bytes_per_second=scaled))
    return replace(cluster, node=node)


def test_a_row_costs_the_same_alone_and_among_others():
    workload = on("64xh100", sequences=256)
    rows = [
        Layout(dp=64 // (tp * pp), tp=tp, pp=pp, zero_stage=1, precision="bf16") for tp, pp in product((1, 2, 8), (1, 2, 4))
    ]
    together = price(workload, LayoutTable.of(rows))
    alone = [price(workload, LayoutTable.of([row])).step_seconds[0] for row in rows]
    np.testing.assert_allclose(together.step_seconds, alone, rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]
)
def test_the_formula_of_a_schedule_is_close_to_the_schedule_played(schedule: str, virtual_stages: int):
    workload = on("256xh100")
    differences = []
    for tp, pp in product((2, 4, 8), (2, 4, 8)):
        layout = Layout(dp=256 // (tp * pp), tp=tp, pp=pp, zero_stage=1, precision="bf16", schedule=schedule,
                        virtual_stages=virtual_stages)  # fmt: skip
        formula = price(workload, LayoutTable.of([layout])).step_seconds[0]
        differences.append(formula / predict(workload, layout).step_seconds - 1)
    assert abs(np.median(differences)) < 0.03
    assert max(map(abs, differences)) < 0.1


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=16),
        Layout(pp=16, virtual_stages=7, schedule="interleaved"),
        Layout(pp=16, virtual_stages=2, schedule="dualpipe-v"),
        Layout(pp=16, schedule="dualpipe"),
    ],
)
def test_the_ranks_of_a_pipeline_hold_the_model_once(layout: Layout):
    workload = on("64xh100", "llama-3.1-405b", stack="ultrascale")
    stages = partition_stages(workload, LayoutTable.of([layout]))
    # Ranks between are taken for as full as the fullest: 126 layers in 112 stages make ranks of 7, 8 and 9.
    most = num_parameters(workload.model) * (1 + 15 / 126)
    assert num_parameters(workload.model) * 0.99 <= float((stages.dense_parameters * stages.exists).sum()) <= most


def test_a_program_that_pairs_passes_hides_the_experts_traffic_without_a_pipeline_and_with_several_stages_a_rank():
    plain = on("256xh100", "qwen3-235b-a22b", sequences=512, length=4096)
    pairs = replace(plain, stack=replace(plain.stack, overlaps_expert_parallel=True))
    one_stage = Layout(dp=32, pp=8, ep=8, precision="bf16", zero_stage=1)
    several, alone = replace(one_stage, schedule="interleaved", virtual_stages=3), replace(one_stage, dp=256, pp=1)
    shown, hidden = (
        [predict(case, way).waterfall["expert_parallel"] for way in (one_stage, several, alone)] for case in (plain, pairs)
    )
    assert hidden[0] == shown[0] > 0
    assert hidden[1] == pytest.approx(shown[1] / 2)  # 16 micro-batches over 8 ranks: half of them are in pairs
    assert hidden[2] == pytest.approx(shown[2] / 2)  # 2 micro-batches: the first forward and the last backward are alone
    assert predict(pairs, several).step_seconds < predict(plain, several).step_seconds
    slowed, whole = (predict(case, alone).waterfall["compute"] for case in (pairs, plain))
    assert slowed == pytest.approx(whole + CONSTANTS.overlap_slowdown * hidden[2])  # what is hidden takes SMs from the products


def test_layers_left_over_go_to_the_middle_and_are_all_there():
    workload = on("64xh100", "llama-3.1-405b")
    for chunks in (1, 2, 7, 16, 128):
        cut = chunk_layers_of(workload, chunks, None)
        assert (sum(cut), len(cut)) == (126, chunks)
        assert cut[-1] == min(cut)


def test_a_cut_of_ones_own_is_priced_as_it_is():
    workload = on("64xh100", sequences=256)
    even = Layout(dp=4, tp=4, pp=4, zero_stage=1, precision="bf16")
    lopsided = predict(workload, replace(even, layers_per_stage=(50, 10, 10, 10)))
    assert lopsided.step_seconds > 1.8 * predict(workload, even).step_seconds
    assert lopsided.memory.allocated > 1.5 * predict(workload, even).memory.allocated
    assert lopsided.layout.layers_per_stage == (50, 10, 10, 10)


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_schedule_from_a_file_costs_and_keeps_what_its_actions_do(tmp_path: Path, name: str, stages: int):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(build_schedule(name, 4, 16)))
    known = Layout(dp=4, tp=4, pp=4, zero_stage=1, precision="bf16", schedule=name, virtual_stages=stages)
    ours, its = (predict(on("64xh100", sequences=64), one) for one in (known, replace(known, schedule=str(file))))
    assert its.step_seconds == pytest.approx(ours.step_seconds, rel=2e-3)  # stragglers' share is of a stand-in's time
    assert its.memory.allocated == pytest.approx(ours.memory.allocated)
    assert its.layout.schedule == str(file)


def test_a_schedule_from_a_file_whose_stages_are_elsewhere_is_refused(tmp_path: Path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(build_schedule("interleaved", 4, 16)))
    with pytest.raises(SpecError, match="has 8 stages on 4 ranks"):
        predict(on("64xh100", sequences=64), Layout(dp=4, tp=4, pp=4, schedule=str(file)))


def test_activations_on_the_host_take_the_time_of_the_way_there():
    workload = on("64xh100", sequences=128)
    layout = Layout(dp=4, tp=4, pp=4, zero_stage=1, precision="bf16")
    here, there = predict(workload, layout), predict(workload, replace(layout, offload_activations=True))
    assert there.memory.allocated < 0.6 * here.memory.allocated
    assert there.waterfall["offload"] > 0 == here.waterfall["offload"]


def test_optimizers_differ_in_memory_and_muon_in_time():
    workload = on("8xh100", "llama-3-8b", sequences=16)
    layout = Layout(dp=8, zero_stage=1, precision="bf16")
    found = {
        name: predict(replace(workload, stack=with_optimizer(workload.stack, name)), layout)
        for name in ("adamw", "adamw-8bit", "muon")
    }
    share = num_parameters(workload.model) / 8
    saved = found["adamw"].memory.allocated - found["adamw-8bit"].memory.allocated
    assert saved == pytest.approx(share * (8 - 2.03125), rel=0.05)
    assert found["muon"].waterfall["optimizer"] > found["adamw"].waterfall["optimizer"]
    with pytest.raises(SpecError, match="adamw, adamw-bf16, adamw-8bit, muon"):
        with_optimizer(workload.stack, "sgd")


def test_published_runs_are_met_within_a_fifth():
    """Korthikanti et al. 2022, table 5 (175B, selective: 13.75 s a step); DeepSeek-V3 report, table 1 (180,000 H800 hours for
    1T tokens); Llama 3, table 4 (400 TFLOP/s a GPU on 16,384)."""
    gpt = Workload(PRESETS["gpt-3-175b"], parse_cluster("64xa100"), 2048, 64, STACKS["megatron"])
    korthikanti = Layout(tp=8, pp=8, virtual_stages=3, schedule="interleaved", precision="bf16", recompute="selective")
    assert predict(gpt, korthikanti).step_seconds == pytest.approx(13.75, rel=0.2)

    deepseek = on("2048xh800", "deepseek-v3", sequences=15360, length=4096)
    two_ways = Layout(dp=128, pp=16, ep=64, zero_stage=1, precision="fp8", schedule="dualpipe")
    hours = 2048 * predict(deepseek, two_ways).step_seconds / 3600 / deepseek.tokens_per_step * 1e12
    assert hours == pytest.approx(180_000, rel=0.2)

    llama = on("16384xh100", "llama-3.1-405b", sequences=2048)
    own = Layout(dp=128, tp=8, pp=16, virtual_stages=8, schedule="interleaved", zero_stage=1, precision="bf16",
                 layers_per_stage=(0, *[1] * 126, 0))  # fmt: skip
    assert predict(llama, own).mfu(full_attention=True) * 989.4 == pytest.approx(400, rel=0.2)


def test_stages_are_cut_as_our_trainer_cuts_them():
    model = PRESETS["llama-3.2-1b"]
    layout = Layout(dp=2, pp=4, zero_stage=1, precision="bf16")
    ours = Workload(model, parse_cluster("8xh100"), 4096, 64)
    stages = partition_stages(ours, LayoutTable.of([layout]))
    assert chunk_layers_of(ours, 4, None) == [len(layers) for layers in stage_layers(model, layout, 4096)] == [5, 5, 5, 1]
    assert stages.layers[:, 0, 0].tolist() == [5, 5, 1]
    assert chunk_layers_of(replace(ours, stack=STACKS["torchtitan"]), 4, None) == [4, 4, 4, 4]
    given = predict(ours, replace(layout, layers_per_stage=(4, 4, 4, 4)))
    assert given.waterfall["compute"] / predict(ours, layout).waterfall["compute"] > 1.3


def test_more_ranks_than_experts_share_out_their_messages_and_updates_as_fewer_do() -> None:
    def parts(dp: int) -> dict[str, float]:
        workload = Workload(preset("mixtral-8x7b"), parse_cluster("64xh100"), 4096, dp)
        return predict(workload, Layout(dp=dp, zero_stage=3, precision="bf16", recompute="full")).waterfall

    more, fewer = parts(64), parts(16)
    assert more["data_parallel"] < 1.6 * fewer["data_parallel"]
    assert more["optimizer"] == pytest.approx(fewer["optimizer"] / 4, rel=0.01)
