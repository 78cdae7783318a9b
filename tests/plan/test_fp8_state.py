"""fp8 beside what blocks keep: histories, weights gathered in 8 bits, blocks that stay in bf16; in memory and in seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters, weights
from ultrascale.description.layout import Layout
from ultrascale.plan.columns.footprint import Footprint, stage_memory
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.memory.replay import plan_memory
from ultrascale.plan.time.price import predict, price_time
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.time.step_parts import step_parts
from ultrascale.plan.workload import Workload
from ultrascale.work.fp8_slots import num_block_slots, num_slots, weights_gathered_in_fp8

LLAMA = preset("llama-3-8b")
SMALL = replace(LLAMA, num_hidden_layers=16)
MIXTRAL = replace(preset("mixtral-8x7b"), num_hidden_layers=4)
FP8 = Layout(precision="fp8")


CALM = replace(CONSTANTS, straggler_per_doubling=0.0)
"""Then the rest of a step is what is sent once."""


def workload_of(layout: Layout, model: Model = SMALL) -> Workload:
    return Workload(model, parse_cluster("64xh100"), 4096, layout.dp * layout.micro_batch_size * 2)


def footprint(layout: Layout, model: Model = SMALL) -> Footprint:
    workload, table = workload_of(layout, model), LayoutTable.of([layout])
    return stage_memory(workload, table, partition_stages(workload, table, layout.layers_per_stage)).row(0)


def seconds(*layouts: Layout, model: Model = SMALL) -> dict[str, Any]:
    table, workload = LayoutTable.of(layouts), workload_of(layouts[0], model)
    return price_time(workload, table, partition_stages(workload, table), CALM)[1]


def all_reduce(num_bytes: float, size: int, stride: int = 1, *, kind: str = "all_reduce") -> float:
    return float(collective_seconds(parse_cluster("64xh100"), kind, np.float64(num_bytes), size=size, stride=stride))


@pytest.mark.parametrize("pp, blocks", [(1, [14]), (4, [3, 4, 3])])
def test_histories_are_in_the_footprint_to_the_byte(pp: int, blocks: list[int]) -> None:
    layout = replace(FP8, fp8_scaling="delayed", dp=8, pp=pp, fp8_keep_blocks=1, layers_per_stage=(16 // pp,) * pp)
    short, long = (replace(layout, fp8_amax_history_len=length) for length in (16, 4096))
    more = footprint(long).by_rank - footprint(short).by_rank
    assert more[: len(blocks)].tolist() == [4 * num_block_slots(SMALL, 1) * 4080 * count for count in blocks]


@pytest.mark.parametrize("scaling", ["row", "tensor", "delayed"])
@pytest.mark.parametrize("layout", [
    Layout(dp=8, zero_stage=3), Layout(dp=8, zero_stage=2, recompute="full"), Layout(dp=2, zero_stage=1, micro_batch_size=2),
    Layout(dp=8, zero_stage=3, fp8_keep_blocks=3, recompute="selective"),
], ids=str)  # fmt: skip
def test_weights_gathered_in_fp8_take_what_the_exact_replay_says(layout: Layout, scaling: Any) -> None:
    for gathers in (False, True):
        layout = replace(layout, precision="fp8", fp8_scaling=scaling, fp8_all_gather=gathers)
        sequences = 2 * layout.dp * layout.micro_batch_size
        exact = plan_memory(SMALL, layout, sequence_length=4096, sequences_per_batch=sequences).peak.total
        assert footprint(layout).allocated == pytest.approx(exact, rel=0.03)


def test_whole_weights_of_products_take_half() -> None:
    layout = replace(FP8, dp=8, zero_stage=2)
    wide, narrow = footprint(layout), footprint(replace(layout, fp8_all_gather=True))
    names = weights_gathered_in_fp8(SMALL, replace(layout, fp8_all_gather=True))
    halved = sum(weight.numel for weight in weights(SMALL) if weight.name in names)
    assert wide.phase == narrow.phase
    at_peak = 15 / 16  # the last block has let go of its own
    assert wide.categories["gathered"] - narrow.categories["gathered"] == pytest.approx(halved * at_peak, rel=1e-6)
    assert wide.allocated - narrow.allocated == pytest.approx(halved, rel=0.2)


def test_gathers_of_products_weights_take_half_of_the_time() -> None:
    """Of so few tokens that nothing of it is hidden behind computing."""
    layout = replace(FP8, dp=64, zero_stage=1)
    workload = replace(workload_of(layout), sequence_length=64)
    table = LayoutTable.of([layout, replace(layout, fp8_all_gather=True)])
    wide, narrow = price_time(workload, table, partition_stages(workload, table), CALM)[1]["data_parallel"]
    products = sum(w.numel for w in weights(SMALL) if w.layer == 1 and len(w.shape) > 1)
    rest = num_parameters(SMALL) / 16 - products  # a bucket's share of embedding, norms and head
    expected = [16 * all_reduce(size, 64, kind="all_gather") for size in (2 * (products + rest), products + 2 * rest)]
    assert wide - narrow == pytest.approx(expected[0] - expected[1], rel=1e-3)


@pytest.mark.parametrize("scaling, each", [("tensor", 7), ("row", 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)])
def test_scales_of_weights_are_two_messages_an_update_and_none_with_a_history(scaling: Any, each: int) -> None:
    layout = replace(FP8, dp=8, tp=2, zero_stage=3, fp8_scaling=scaling)
    without, found = seconds(layout, replace(layout, fp8_all_gather=True))["rest"]
    own = each if scaling == "tensor" else 4096 * 2 + (each - 2 * 4096) // 2  # o and down have rows on both ranks of tp
    expected = all_reduce(4 * 16 * own, 8, 2) + all_reduce(4 * 16 * own, 2)
    assert found - without == pytest.approx(expected, rel=0.05)
    delayed = replace(layout, fp8_scaling="delayed")
    one, other = seconds(delayed, replace(delayed, fp8_all_gather=True))["rest"]
    assert one == other


def test_experts_are_gathered_in_fp8_over_the_ranks_that_repeat_them() -> None:
    layout = replace(FP8, dp=16, ep=8, zero_stage=3)
    parts = seconds(layout, replace(layout, fp8_all_gather=True), model=MIXTRAL)
    assert parts["data_parallel"][1] < parts["data_parallel"][0]
    wide, narrow = footprint(layout, MIXTRAL), footprint(replace(layout, fp8_all_gather=True), MIXTRAL)
    assert narrow.categories["gathered"] < 0.6 * wide.categories["gathered"] + 2 * 4096 * MIXTRAL.vocab_size


def test_blocks_in_bf16_are_priced_as_such() -> None:
    kept = (0, 1, 3)
    parts = seconds(*(replace(FP8, fp8_keep_blocks=k) for k in kept), replace(FP8, precision="bf16"))
    *in_fp8, bf16 = parts["compute"]
    assert bf16 > 1.15 * in_fp8[0]
    for k, found in zip(kept, in_fp8, strict=True):
        assert found == pytest.approx(in_fp8[0] + 2 * k / 16 * (bf16 - in_fp8[0]), rel=1e-6)


def test_of_a_pipeline_the_ends_have_the_blocks_in_bf16() -> None:
    layout = replace(FP8, pp=4, fp8_keep_blocks=1, layers_per_stage=(4, 4, 4, 4))
    workload = replace(workload_of(layout), sequences_per_batch=16)
    table = LayoutTable.of([layout, replace(layout, fp8_keep_blocks=5), replace(layout, precision="bf16")])
    stages = partition_stages(workload, table, layout.layers_per_stage)
    assert stages.kept_layers.sum(axis=1).T.tolist() == [[1, 0, 1], [4, 1, 4], [0, 0, 0]]
    found = predict(workload, layout)
    of_others = [predict(workload, replace(layout, **one)) for one in ({"fp8_keep_blocks": 0}, {"precision": "bf16"})]
    assert of_others[0].step_seconds < found.step_seconds < of_others[1].step_seconds
    running = sum(value for name, value in found.waterfall.items() if name != "checkpoints")
    assert sum(step_parts(found).values()) == pytest.approx(running, rel=1e-6)


def test_the_message_of_delayed_scales_is_of_blocks_in_fp8_alone() -> None:
    layout = replace(FP8, dp=64, fp8_scaling="delayed")
    few = replace(layout, fp8_keep_blocks=7)
    whole, less = seconds(layout, few)["rest"]
    expected = all_reduce(4 * num_slots(SMALL, layout), 64) - all_reduce(4 * num_slots(SMALL, few), 64)
    assert whole - less == pytest.approx(expected, rel=1e-6) and expected > 0
