"""Every accelerator of the catalogue has a plan, and one that its own peaks allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.machines import ACCELERATORS, NODES
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.laws.compute import matmul_seconds
from ultrascale.plan.laws.devices import power_slowdown
from ultrascale.plan.search.search import search
from ultrascale.plan.time.offload import host_link
from ultrascale.plan.time.price import Prediction, half_precision_peak, predict
from ultrascale.plan.workload import Workload

MODEL = replace(preset("llama-3.2-1b"), num_hidden_layers=8)
SEQUENCES = 64


def planned(name: str, **changes) -> Prediction:
    cluster = parse_cluster(f"8x{name}")
    precision = "bf16" if "bf16" in cluster.accelerator.peak_flops else "fp16"
    layout = Layout(**{"dp": 8, "zero_stage": 3, "recompute": "full", "precision": precision, **changes})
    return predict(Workload(MODEL, cluster, 2048, SEQUENCES, STACKS["ultrascale"]), layout)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_plan_is_made_and_lies_between_what_the_peak_and_experience_allow(name: str) -> None:
    one = planned(name)
    device = one.workload.cluster.accelerator
    share = one.mfu() / device.matmul_fraction.value  # type: ignore[union-attr]
    assert 0.03 < share < 0.9, share  # eight cards on PCIe wait for their gathers
    assert one.memory.fits and 0 < float(one.memory.allocated) < device.memory_bytes.value
    assert sum(one.waterfall.values()) == pytest.approx(one.step_seconds)
    assert device.multiprocessors > 0
    alone = planned(name, tp=8, dp=1, zero_stage=0, recompute="none", micro_batch_size=1)
    assert alone.step_seconds > one.step_seconds  # tensor parallelism of a small model waits for its messages


@pytest.mark.parametrize(
    ("tight", "ample"),
    [("h100-96", "h100-sxm"), ("h100-pcie", "h100-sxm"), ("h100-nvl", "h100-sxm"), ("gh200", "h200"), ("gb200", "gb300")],
)
def test_a_chip_with_less_power_for_its_peak_computes_slower_but_by_no_more_than_that(tight: str, ample: str) -> None:
    devices = [ACCELERATORS[name] for name in (tight, ample)]
    slower, faster = (half_precision_peak(one) * matmul_seconds(one, 16384, 16384, 16384) for one in devices)
    more_work, less_work = (half_precision_peak(one) / one.watts.value for one in devices)  # type: ignore[union-attr]
    assert 1.01 < slower / faster < more_work / less_work


def test_power_slows_no_device_whose_own_products_were_measured_or_that_is_another_chip() -> None:
    assert {power_slowdown(ACCELERATORS[name]) for name in ("a100-80", "b200", "h20", "mi355x")} == {1.0}


def test_less_power_slows_what_computes_and_nothing_that_waits_for_memory() -> None:
    ample = ACCELERATORS["h100-sxm"]
    assert ample.watts
    watts = [replace(ample, watts=replace(ample.watts, value=value)) for value in (350, 700, 1400, 2800)]
    large, narrow = ([matmul_seconds(one, m, 8192, 8192) for one in watts] for m in (8192, 16))
    assert large[0] > 1.5 * large[1] > 1.6 * large[2] and large[2] == large[3]
    assert narrow == pytest.approx([narrow[0]] * 4, rel=0.03)


@pytest.mark.parametrize("name", [name for name, device in ACCELERATORS.items() if "fp8" in device.peak_flops])
def test_large_products_in_fp8_are_faster_where_there_are_any(name: str) -> None:
    narrow, wide = (matmul_seconds(ACCELERATORS[name], 16384, 16384, 16384, dtype=dtype) for dtype in ("fp8", "bf16"))
    assert narrow < 0.75 * wide


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("l4", "l40s"), ("a10g", "a6000"), ("rtx-3090", "rtx-4090"), ("rtx-4090", "rtx-5090"), ("mi250x", "mi300x"),
        ("v100-32", "a100-80"), ("h20", "h100-sxm"), ("a6000", "rtx-6000-ada"), ("h800", "h200"), ("mi325x", "mi355x"),
    ],
)  # fmt: skip
def test_a_faster_card_is_faster(slower: str, faster: str) -> None:
    assert planned(slower).step_seconds > planned(faster).step_seconds


@pytest.mark.parametrize("name", ["l40s", "a10g", "rtx-4090", "mi250x"])
def test_a_search_finds_a_layout_of_a_new_card(name: str) -> None:
    best = search(Workload(MODEL, parse_cluster(f"8x{name}"), 2048, SEQUENCES, STACKS["ultrascale"])).best
    assert best is not None and best.layout.tp == 1  # PCIe or the narrowest link of a ring
    assert best.mfu() < 1 and half_precision_peak(best.workload.cluster.accelerator) > 0


@pytest.mark.parametrize("name", ACCELERATORS)
def test_no_card_has_a_faster_link_to_its_host_than_to_its_neighbours_over_pcie(name: str) -> None:
    workload = planned(name).workload
    inside = workload.cluster.node.intra_link
    assert inside is not None
    if inside.name.startswith("PCIe"):
        assert 0.7 < host_link(workload) / inside.bytes_per_second.value < 1
    if name in ("a40", "l40s", "rtx-4090"):
        assert host_link(workload) == 25e9


def test_every_accelerator_has_a_node() -> None:
    assert {node.accelerator.name for node in NODES.values()} == set(ACCELERATORS)
