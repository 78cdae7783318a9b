from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.pipeline.pipeline_steady import long_step_seconds
from ultrascale.plan.pipeline.pipelined import stage_seconds
from ultrascale.plan.time.blocks import price_blocks
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv


@pytest.mark.parametrize(("sequence_parallel", "share"), [(True, 2 / 3), (False, 1.0)])
def test_a_column_parallel_layer_hides_its_own_backward_traffic_where_it_is_fused(
    sequence_parallel: bool, share: float
) -> None:
    """With sequence parallelism a block's backward pass gathers twice and scatters once for each pair of layers, all as large:
    gathering the gradient of a row-parallel layer has nothing beside it. Without, it sums the column-parallel layer's alone."""
    layout = Layout(dp=8, tp=8, sequence_parallel=sequence_parallel, zero_stage=1, precision="bf16")
    fused = Workload(
        preset("llama-3-70b"), parse_cluster("64xh100"), 8192, 64, replace(STACKS["megatron"], overlaps_tensor_parallel=True)
    )
    block = price_blocks(fused, LayoutTable.of([layout])).part(0)
    assert block.tp_beside[0] / block.tp_backward[0] == pytest.approx(share, rel=0.02)
    plain = replace(fused, stack=STACKS["megatron"])
    alone = replace(fused, stack=replace(plain.stack, sends_beside_gradients=False))
    exposed = [predict(one, layout).waterfall["tensor_parallel"] for one in (fused, alone, plain)]
    layers, hides = 80 * 8, 1 - CONSTANTS.overlap_slowdown
    gone = layers * (block.tp_beside[0] * hides)
    rest = layers * (block.tp_forward[0] + block.tp_backward[0]) - gone
    assert exposed[0] == pytest.approx(rest * (1 - CONSTANTS.tensor_parallel_hidden), rel=0.02)
    assert exposed[1] == pytest.approx(rest + gone, rel=0.02) and exposed[2] == pytest.approx(rest, rel=0.02)


@pytest.mark.parametrize(("cp", "recompute", "length"), [(4, "selective", 4096), (8, "none", 8192), (8, "full", 8192)])
def test_slower_products_shorten_no_step_whose_launches_wait_for_a_ring(cp: int, recompute: str, length: int) -> None:
    """Attention that takes longer hides more of the ring beside it, and fills time in which the device waits for Python."""
    layout = Layout(dp=8, tp=4, cp=cp, recompute=recompute, precision="bf16")
    model = replace(preset("olmo-2-7b"), num_hidden_layers=6)
    fast = Workload(model, parse_cluster(f"{32 * cp}xmi355x"), length, 256, STACKS["vtrain"])
    device = fast.accelerator
    peaks = {dtype: replace(peak, value=peak.value / 2) for dtype, peak in device.peak_flops.items()}
    slower = replace(device, name="slower", like=device.name, peak_flops=peaks)
    slow = replace(fast, cluster=replace(fast.cluster, node=replace(fast.cluster.node, accelerator=slower)))
    assert predict(slow, layout).step_seconds >= predict(fast, layout).step_seconds * (1 - 1e-9)


@pytest.mark.parametrize("schedule", ["dualpipe-v", "dualpipe"])
def test_only_the_experts_traffic_depends_on_the_links_whatever_pairs_hide_of_it(schedule: str) -> None:
    virtual = 2 if schedule == "dualpipe-v" else 1
    layout = Layout(dp=16, pp=4, ep=8, virtual_stages=virtual, schedule=schedule, zero_stage=1, precision="bf16")
    slow = Workload(preset("mixtral-8x7b"), parse_cluster("64xh100"), 4096, 512, STACKS["ultrascale"])
    link = slow.cluster.node.intra_link
    assert link is not None
    faster = replace(link, bytes_per_second=replace(link.bytes_per_second, value=1e3 * link.bytes_per_second.value),
                     achieved_bytes_per_second=None)  # fmt: skip
    fast = replace(slow, cluster=replace(slow.cluster, node=replace(slow.cluster.node, intra_link=faster)))
    found, quick = (predict(one, layout).waterfall for one in (slow, fast))
    assert found["expert_parallel"] > 1.5 * quick["expert_parallel"] > 0
    assert all(part >= 0 for part in (*found.values(), *quick.values()))
    assert found["compute"] == pytest.approx(quick["compute"], rel=1e-3)  # which gathers slow down a little
    assert found["bubble"] == pytest.approx(quick["bubble"], rel=1e-2)


@pytest.mark.parametrize(("schedule", "virtual"), [("zb-v", 2), ("dualpipe-v", 2), ("dualpipe", 1)])
def test_gathers_slow_down_what_they_run_beside_in_every_schedule(schedule: str, virtual: int) -> None:
    layout = Layout(dp=4, pp=2, virtual_stages=virtual, schedule=schedule, zero_stage=3, micro_batch_size=2, precision="bf16")
    workload = Workload(preset("llama-3-8b"), parse_cluster("8xh100"), 4096, 248, STACKS["ultrascale"])
    calm = replace(CONSTANTS, overlap_slowdown=0.0)
    found, alone = (predict(workload, layout, constants) for constants in (CONSTANTS, calm))
    slowed = found.waterfall["compute"] - alone.waterfall["compute"]
    assert slowed > 0.02 * alone.step_seconds
    assert found.step_seconds - alone.step_seconds == pytest.approx(slowed, rel=0.05)


def test_a_step_takes_at_least_as_long_as_its_pipeline() -> None:
    """Here Python's launches hold up the first of a rank's stages, and the head the last: their sum hides neither."""
    model = replace(preset("qwen3-0.6b"), num_hidden_layers=8)
    workload = Workload(model, parse_cluster("8xb300"), 8192, 32, STACKS["eager"])
    layout = Layout(cp=2, pp=4, virtual_stages=2, schedule="interleaved", recompute="selective", precision="bf16")
    played = long_step_seconds("interleaved", 4, 32, stage_seconds(workload, layout), virtual_stages=2)
    assert predict(workload, layout).step_seconds > float(played[0])


def test_pairs_that_hide_experts_take_at_least_as_long_as_their_pipeline() -> None:
    """The rank of most experts is not the one with most work besides their traffic: DeepSeek-V3 was 8 percent too fast."""
    workload = Workload(preset("deepseek-v3"), parse_cluster("2048xh800"), 4096, 15_360, STACKS["hai-llm"])
    layout = Layout(dp=128, pp=16, ep=64, schedule="dualpipe", zero_stage=1, precision="fp8", micro_batch_size=1)
    played = long_step_seconds("dualpipe", 16, 120, stage_seconds(workload, layout))
    assert predict(workload, layout).step_seconds > float(played[0])


def test_pairs_of_a_schedule_file_are_those_of_the_known_schedule(tmp_path: Path) -> None:
    layout = Layout(dp=8, pp=4, ep=8, virtual_stages=2, schedule="dualpipe-v", zero_stage=1, precision="bf16", recompute="full")
    workload = Workload(preset("qwen3-30b-a3b"), parse_cluster("32xh100"), 4096, 128, STACKS["ultrascale"])
    known = predict(workload, layout)
    file = tmp_path / "pairs.csv"
    file.write_text(to_csv(build_schedule("dualpipe-v", 4, known.num_micro_batches)))
    of_file = predict(workload, replace(layout, schedule=str(file)))
    assert of_file.step_seconds == pytest.approx(known.step_seconds, rel=0.01)
    assert all(part >= 0 for part in of_file.waterfall.values())
    for name in ("expert_parallel", "bubble"):
        assert of_file.waterfall[name] == pytest.approx(known.waterfall[name], rel=0.1)


def test_pairs_without_experts_have_no_experts_traffic_and_recomputing_takes_no_compute_away() -> None:
    workload = Workload(preset("smollm2-135m"), parse_cluster("64xh100"), 2048, 128, STACKS["ultrascale"])
    layout = Layout(dp=16, pp=4, virtual_stages=2, schedule="dualpipe-v", zero_stage=1, precision="bf16")
    plain, again = (predict(workload, replace(layout, recompute=way)).waterfall for way in ("none", "full"))
    assert plain["expert_parallel"] == again["expert_parallel"] == 0
    assert again["compute"] >= plain["compute"] * (1 - 1e-9) and again["recompute"] > plain["recompute"]
