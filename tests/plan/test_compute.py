"""Prices of one device's work: near what was measured, above the roofline, and never falling when work grows."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import Accelerator, Sourced
from ultrascale.catalogue.machines import ACCELERATORS, this_machine
from ultrascale.description.problems import SpecError
from ultrascale.plan.flops import mean_context
from ultrascale.plan.laws import curves
from ultrascale.plan.laws.compute import attention_seconds, elementwise_seconds, matmul_seconds
from ultrascale.plan.laws.devices import POWER_EXPONENT, matmul_curve, relative_of

MEASURED = Path(__file__).parents[2] / "benchmarks" / "plan"
H100, H200, A100, B200 = (ACCELERATORS[name] for name in ("h100-sxm", "h200", "a100-80", "b200"))
DTYPES = ("bf16", "fp8")
KINDS = ("forward", "input-gradient", "weight-gradient")

devices = st.sampled_from(sorted(ACCELERATORS)).map(ACCELERATORS.__getitem__)
sizes = st.integers(1, 70_000)
heads = st.integers(1, 128)
lengths = st.integers(1, 100_000)


def tflops(device: Accelerator, m: int, n: int, k: int, **options: Any) -> float:
    return 2 * m * n * k / matmul_seconds(device, m, n, k, **options) / 1e12


def causal(device: Accelerator, *, num_heads: int = 32, length: int = 4096, backward: bool = False, **options: Any) -> float:
    """Seconds of causal attention with eight query heads per key/value head of 128."""
    return attention_seconds(
        device, batch=1, heads=num_heads, key_value_heads=max(1, num_heads // 8), head_dim=128, queries=length, keys=length,
        share=mean_context(length, None) / length, backward=backward, **options,
    )  # fmt: skip


def is_aligned(n: int, k: int, multiple: int = 8) -> bool:
    return n % multiple == k % multiple == 0


def peak_of(device: Accelerator) -> float:
    return max(device.peak_flops[name].value for name in ("bf16", "fp16") if name in device.peak_flops)


# --- near what was measured


@pytest.mark.parametrize(
    ("name", "shape", "microseconds"),
    [  # medians of what NVIDIA's aiconfigurator timed nearby; single rows scatter by 5 %
        ("a100-80", (4096, 4096, 4096), 512), ("a100-80", (8192, 8192, 8192), 4246), ("h100-sxm", (4096, 4096, 4096), 174),
        ("h100-sxm", (8192, 8192, 8192), 1407), ("h200", (8192, 8192, 8192), 1372), ("b200", (8192, 8192, 8192), 740),
    ],
)  # fmt: skip
def test_a_square_product_takes_what_it_was_measured_to_take(name: str, shape: tuple[int, int, int], microseconds: float):
    assert matmul_seconds(ACCELERATORS[name], *shape) * 1e6 == pytest.approx(microseconds, rel=0.09)


def test_a_small_product_reaches_a_quarter_of_what_a_large_one_does():
    # The tables' medians: 0.23 of the peak at 0.5 to 2 GFLOP on H100, 0.77 at 0.5 to 2 TFLOP.
    assert tflops(H100, 512, 1024, 1024) / 989.4 == pytest.approx(0.23, abs=0.06)
    assert tflops(H100, 8192, 8192, 8192) / 989.4 == pytest.approx(0.77, abs=0.03)


def test_gradients_of_a_product_are_priced_as_measured_on_a100():
    ratios = {kind: [] for kind in KINDS}
    with (MEASURED / "matmul_directions_measured.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["accelerator"] == "a100-80" and row["count"] == "1"]
    for row in rows:
        for kind in KINDS:
            m, n, k = (int(row[name]) for name in "mnk")
            law = matmul_seconds(A100, m, n, k, kind=kind, output_bytes=float(row["output_bytes"]))
            ratios[kind].append(float(row[f"{kind.replace('-', '_')}_us"]) * 1e-6 / law)
    speed = np.median(ratios["forward"])
    for kind in KINDS:
        assert np.median(ratios[kind]) == pytest.approx(speed, rel=0.03)
        assert np.mean(np.abs(np.array(ratios[kind]) / speed - 1)) < 0.05


@pytest.mark.parametrize(
    ("name", "kernel", "error"),
    [("a100-80", "flash-2", 0.06), ("h100-sxm", "flash", 0.06), ("h100-sxm", "flash-2", 0.03), ("h200", "cudnn", 0.07),
     ("gb200", "cudnn", 0.08)],
)  # fmt: skip
def test_published_attention_kernels_are_met_within_a_few_percent(name: str, kernel: str, error: float):
    with (MEASURED / "attention_measured.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["accelerator"], row["kernel"]) == (name, kernel)]
    errors = []
    for row in rows:
        if row["dtype"] == "fp8":
            continue
        length, window = int(row["sequence_length"]), int(row["window"] or 0)
        seconds = attention_seconds(
            ACCELERATORS[name], batch=int(row["batch"]), heads=int(row["heads"]), key_value_heads=int(row["key_value_heads"]),
            head_dim=int(row["head_dim"]), value_head_dim=int(row["value_head_dim"]), queries=length, keys=length,
            share=1.0 if row["mask"] == "none" else mean_context(length, window or None) / length,
            backward=row["pass"] == "backward", kernel=kernel,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip
        errors.append(seconds * 1e6 / float(row["latency_us"]) - 1)
    assert len(errors) > 25
    assert np.mean(np.abs(errors)) < error
    assert abs(np.median(errors)) < 0.04


def test_few_heads_per_device_starve_blackwell_as_measured():
    # SimuMax on B200: 64 heads reach 2.8 times the rate of 8 forward, 1.15 backward.
    forward = 8 * causal(B200, num_heads=8) / causal(B200, num_heads=64)
    backward = 8 * causal(B200, num_heads=8, backward=True) / causal(B200, num_heads=64, backward=True)
    assert forward == pytest.approx(2.8, rel=0.2)
    assert backward == pytest.approx(1.15, rel=0.2)


def test_flash_attention_2_takes_half_as_long_again_on_hopper():
    assert causal(H100, kernel="flash-2") / causal(H100) == pytest.approx(1.65, abs=0.2)


def test_a_sliding_window_saves_time_but_less_than_it_saves_scores():
    window = mean_context(32768, 128) / 32768
    common: dict[str, Any] = {"batch": 1, "heads": 32, "key_value_heads": 8, "head_dim": 64, "queries": 32768, "keys": 32768}
    ratio = attention_seconds(H100, **common, share=0.5) / attention_seconds(H100, **common, share=window)
    assert 20 < ratio < 0.5 / window / 3


# --- never below the roofline, never falling


@settings(deadline=None, max_examples=200)
@given(devices, sizes, sizes, sizes, st.sampled_from(KINDS), st.integers(1, 64))
def test_no_product_is_faster_than_peak_or_memory(device, m, n, k, kind, count):
    seconds = matmul_seconds(device, m, n, k, kind=kind, count=count)
    assert seconds >= 2 * count * m * n * k / peak_of(device)
    assert seconds >= 2 * count * (m * n + n * k + m * k) / device.memory_bytes_per_second.value


@settings(deadline=None, max_examples=200)
@given(devices, sizes, sizes, sizes, st.sampled_from(KINDS), st.integers(1, 64), st.sampled_from("mnkc"), st.integers(1, 5000))
def test_a_larger_product_is_never_cheaper(device, m, n, k, kind, count, grown, by):
    base = {"m": m, "n": n, "k": k, "c": count}
    larger = base | {grown: base[grown] + by}
    assume(is_aligned(base["n"], base["k"]) or not is_aligned(larger["n"], larger["k"]))  # padding pays, on devices as here
    seconds = [matmul_seconds(device, x["m"], x["n"], x["k"], count=x["c"], kind=kind) for x in (base, larger)]
    assert seconds[1] >= seconds[0] * (1 - 1e-12)


@settings(deadline=None, max_examples=200)
@given(
    devices,
    heads,
    heads,
    lengths,
    lengths,
    st.sampled_from((64, 80, 96, 128, 160, 192, 256)),
    st.booleans(),
    st.floats(0.01, 1),
)
def test_no_attention_is_faster_than_peak(device, batch, num_heads, queries, keys, head_dim, backward, share):
    seconds = attention_seconds(
        device, batch=batch, heads=num_heads, key_value_heads=num_heads, head_dim=head_dim, queries=queries, keys=keys,
        share=share, backward=backward,
    )  # fmt: skip
    assert seconds >= 4 * batch * num_heads * queries * keys * share * head_dim * (2.5 if backward else 1) / peak_of(device)


@settings(deadline=None, max_examples=300)
@given(devices, heads, heads, lengths, lengths, st.floats(0.01, 0.98), st.booleans(), st.integers(0, 5), st.floats(1.001, 3))
def test_more_attention_is_never_cheaper(device, batch, num_heads, queries, keys, share, backward, grown, factor):
    base: dict[str, Any] = {
        "batch": batch,
        "heads": num_heads,
        "queries": queries,
        "keys": keys,
        "head_dim": 64,
        "share": share,
    }
    name = list(base)[grown]
    more: dict[str, Any] = base | {
        name: min(1.0, base[name] * factor) if name == "share" else int(np.ceil(base[name] * factor))
    }
    seconds = [attention_seconds(device, **x, key_value_heads=1, backward=backward) for x in (base, more)]
    assert seconds[1] >= seconds[0] * (1 - 1e-12)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(("h100-sxm", "h200", "b200", "gb200")), *[st.integers(4096, 70_000)] * 3, st.sampled_from(KINDS))
def test_fp8_is_faster_for_large_products_with_its_casts(name, m, n, k, kind):
    assume(is_aligned(n, k, 16) or not is_aligned(n, k))  # sizes between are aligned for bf16 only
    device = ACCELERATORS[name]
    assert matmul_seconds(device, m, n, k, dtype="fp8", kind=kind) < matmul_seconds(device, m, n, k, kind=kind)


def test_fp8_loses_for_small_products():
    assert matmul_seconds(H100, 512, 1024, 1024, dtype="fp8") > matmul_seconds(H100, 512, 1024, 1024)


# --- sizes that tensor cores and kernels are not made for


@settings(deadline=None, max_examples=100)
@given(devices, st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 20_000), st.integers(1, 7), st.sampled_from(KINDS))
def test_a_product_that_is_not_aligned_costs_more_than_the_aligned_one_above_it(device, n, k, m, missing, kind):
    n, k = 8 * n, 8 * k
    assert matmul_seconds(device, m, n, k, kind=kind) == without_alignment(device, m, n, k, kind)
    for narrower in ((n - missing, k), (n, k - missing)):
        seconds, plain = matmul_seconds(device, m, *narrower, kind=kind), without_alignment(device, m, *narrower, kind)
        assert plain < seconds <= 1.4 * plain
        if min(m, *narrower) > 2048:
            assert seconds > matmul_seconds(device, m, n, k, kind=kind)


def without_alignment(device: Accelerator, m: int, n: int, k: int, kind: str) -> float:
    order = {"forward": (m, n, k), "input-gradient": (m, k, n), "weight-gradient": (n, k, m)}[kind]
    return curves.matmul_law(matmul_curve(device, "bf16", True), *order)


@pytest.mark.parametrize(
    ("name", "shapes", "measured"),
    [  # time over that of the aligned product; issues 181718 and 83272 of pytorch, its float8_experimental's pull request 145
        ("rtx-4090", ((2057, 2057, 2057), (2040, 2040, 2040)), 155.9 / 106.8),
        ("a100-80", ((1024 * 384, 1024, 140), (1024 * 384, 1024, 144)), 132.5 / 85.8 / 1.14),
        ("h100-sxm", ((8193, 5008, 2501), (8193, 5008, 2504)), 690 / 509),
    ],
)
def test_what_alignment_costs_is_what_was_measured(name: str, shapes: tuple[tuple[int, int, int], ...], measured: float):
    odd, aligned = (1 / tflops(ACCELERATORS[name], *shape) for shape in shapes)
    assert odd / aligned == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    ("head_dim", "batch", "length", "forward", "backward"),
    [(128, 8, 2048, 352, None), (128, 8, 8192, 362, None), (64, 8, 2048, 381, 302), (64, 2, 8192, 343, 329)],
)
def test_flash_attention_2_is_no_faster_on_blackwell_than_on_hopper(
    head_dim: int, batch: int, length: int, forward: float, backward: float | None
):
    """TFLOP/s on B200 without a mask (tritonbench's pull request 171; flash-attention's issue 1589)."""
    heads = 16 if head_dim == 128 else 32
    for is_backward, measured in ((False, forward), (True, backward)):
        seconds = attention_seconds(
            ACCELERATORS["b200"], batch=batch, heads=heads, key_value_heads=heads, head_dim=head_dim, queries=length,
            keys=length, backward=is_backward, kernel="flash-2",
        )  # fmt: skip
        work = 4 * batch * heads * head_dim * length**2 * (2.5 if is_backward else 1)
        assert measured is None or work / seconds / 1e12 == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("name", "measured"), [("rtx-3090", 76.5), ("rtx-4090", 160), ("rtx-5090", 235), ("a100-80", 264.5)])
def test_geforce_cards_nearly_reach_their_peak_whose_sums_in_fp32_draw_little_power(name: str, measured: float):
    """bf16 TFLOP/s at 8192 of one program on all of them (torch-performance-test-data on GitHub, 2025)."""
    assert tflops(ACCELERATORS[name], 8192, 8192, 8192) == pytest.approx(measured, rel=0.15)


def test_tokens_are_no_row_s_length_and_fp8_wants_sixteen():
    assert matmul_seconds(H100, 4095, 4096, 4096) <= matmul_seconds(H100, 4096, 4096, 4096)
    slower = [matmul_seconds(H100, 8192, 8200, 8192, dtype=d) / matmul_seconds(H100, 8192, 8192, 8192, dtype=d) for d in DTYPES]
    assert slower[0] < 1.05 and slower[1] > 1.2


def test_a_head_dim_costs_as_much_as_the_next_one_with_a_kernel():
    common: dict[str, Any] = {"batch": 1, "heads": 32, "key_value_heads": 8, "queries": 8192, "keys": 8192, "share": 0.5}
    for odd, kernel in ((150, 160), (108, 128), (80, 96), (450, 480)):
        assert attention_seconds(H100, head_dim=odd, **common) == attention_seconds(H100, head_dim=kernel, **common)


# --- groups, dtypes, other work


def test_grouped_products_overlap_but_small_groups_waste_rows():
    whole = matmul_seconds(H100, 8192, 2048, 7168)
    grouped = matmul_seconds(H100, 8192 / 64, 2048, 7168, count=64)
    alone = 64 * matmul_seconds(H100, 8192 / 64, 2048, 7168)
    ragged = matmul_seconds(H100, 8192 / 64 + 1, 2048, 7168, count=64)
    assert whole < grouped < 0.8 * alone
    assert ragged > 1.005 * grouped


def test_wide_gradients_cost_their_memory_traffic():
    narrow = matmul_seconds(H100, 4096, 28672, 8192, kind="weight-gradient")
    wide = matmul_seconds(H100, 4096, 28672, 8192, kind="weight-gradient", output_bytes=8)
    assert wide - narrow == pytest.approx(0.6 * 6 * 28672 * 8192 / 3.35e12, rel=1e-6)


def test_dtypes_scale_with_their_peaks():
    bf16 = matmul_seconds(A100, 8192, 8192, 8192)
    assert matmul_seconds(A100, 8192, 8192, 8192, dtype="fp16") == bf16
    assert matmul_seconds(A100, 8192, 8192, 8192, dtype="tf32") / bf16 == pytest.approx(2, rel=0.1)
    assert matmul_seconds(A100, 8192, 8192, 8192, dtype="fp32") / bf16 == pytest.approx(16, rel=0.1)


def test_fp8_attention_speeds_up_the_forward_pass_and_on_hopper_not_the_backward():
    assert causal(H200, length=16384) / causal(H200, length=16384, dtype="fp8") == pytest.approx(1.5, abs=0.1)
    assert causal(H200, backward=True) == pytest.approx(causal(H200, backward=True, dtype="fp8"), rel=0.01)


def test_derate_multiplies_every_price():
    assert matmul_seconds(H100, 4096, 4096, 4096, derate=1.1) == pytest.approx(1.1 * matmul_seconds(H100, 4096, 4096, 4096))
    assert causal(H100, derate=1.1) == pytest.approx(1.1 * causal(H100))


def test_elementwise_work_has_a_floor_per_kernel_and_then_runs_at_nine_tenths_of_the_bandwidth():
    assert elementwise_seconds(H100, 4096) == pytest.approx(2.5e-6, rel=0.05)
    assert elementwise_seconds(H100, 4096, num_kernels=10) == pytest.approx(25e-6, rel=0.05)
    assert 1e10 / elementwise_seconds(H100, 1e10) == pytest.approx(0.9 * 3.35e12, rel=0.01)


def test_the_optimizer_takes_columns():
    seconds = elementwise_seconds(H100, np.array([1e9, 2e9]))
    assert seconds[1] - seconds[0] == pytest.approx(1e9 / (0.9 * 3.35e12))


def test_nothing_to_do_takes_no_time():
    assert matmul_seconds(H100, 0, 128, 128) == 0
    assert causal(H100, num_heads=0) == 0


# --- devices


def test_devices_without_a_table_take_after_a_relative():
    assert relative_of(ACCELERATORS["h100-pcie"]) == "h100-sxm"
    pcie, sxm = (tflops(ACCELERATORS[name], 8192, 8192, 8192) for name in ("h100-pcie", "h100-sxm"))
    power = (756 / 350) / (989.4 / 700)  # FLOPs per joule
    assert pcie / sxm == pytest.approx(756 / 989.4 / power**POWER_EXPONENT, rel=0.03)


@pytest.mark.parametrize(("name", "reached"), [("mi300x", 668), ("mi325x", 785), ("mi355x", 0.86 * 1565)])
def test_accelerators_of_amd_reach_what_a_sweep_of_products_reached(name, reached):
    assert tflops(ACCELERATORS[name], 12288, 8192, 8192) == pytest.approx(reached, rel=0.04)


def test_a_device_of_ones_own_is_priced_from_its_peaks():
    own = replace(
        H100,
        name="home-made",
        law="h200",
        same_chip=False,
        peak_flops={"bf16": Sourced(1500e12, "here", "2026")},
        matmul_fraction=None,
    )
    assert 0.6 < tflops(own, 8192, 8192, 8192) / 1500 < 0.85


def test_the_cpu_is_priced_once_it_is_measured():
    cpu = this_machine(1).accelerator
    with pytest.raises(SpecError, match="measured at run time"):
        matmul_seconds(cpu, 512, 512, 512)
    measured = replace(cpu, peak_flops={"fp32": Sourced(1e11, "measured", "now")})
    assert matmul_seconds(measured, 2048, 2048, 2048, dtype="fp32") == pytest.approx(2 * 2048**3 / 1e11, rel=0.15)
    assert elementwise_seconds(measured, 1e9) < 1e-4


def test_a_dtype_the_device_lacks_is_refused():
    with pytest.raises(SpecError, match="fp8"):
        matmul_seconds(A100, 128, 128, 128, dtype="fp8")
    with pytest.raises(SpecError, match="int4"):
        matmul_seconds(A100, 128, 128, 128, dtype="int4")


def test_a_changed_device_of_the_same_name_is_priced_anew():
    fast = replace(H100, peak_flops={"bf16": Sourced(2 * 989.4e12, "here", "2026")}, watts=None)
    before = matmul_seconds(H100, 16384, 16384, 16384)
    assert matmul_seconds(fast, 16384, 16384, 16384) == pytest.approx(before / 2, rel=0.02)


@settings(deadline=None, max_examples=50)
@given(devices, st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=8))
def test_the_law_of_columns_is_the_law_of_numbers(device, shapes):
    assume(device.name != "cpu")
    curve = matmul_curve(device, "bf16", True)
    m, n, k = np.array(shapes, dtype=float).T
    columns = curves.matmul_law(curve, m, n, k, ceil=np.ceil, work=curves.alignment_work(curve, n, k))
    np.testing.assert_allclose(columns, [matmul_seconds(device, *shape) for shape in shapes], rtol=1e-12)
