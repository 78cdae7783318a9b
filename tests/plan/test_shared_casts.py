"""Casts to fp8 that products share are priced once: an input's for all that read it, a gradient's for both that use it."""

from __future__ import annotations

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS, changed_stack
from ultrascale.description.layout import Layout
from ultrascale.plan.laws.compute import columns_seconds, elementwise_seconds, matmul_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.blocks import (
    CAST_BYTES,
    COLUMN_BYTES,
    NARROW_BYTES,
    ROWWISE_OVER_TENSORWISE,
    WIDE_BYTES,
    PartSeconds,
    distinct_shapes,
    price_ops,
)
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Op, Product, Shape
from ultrascale.work.work import block_work

M, N, K = 4096, 13312, 16384
PRODUCT = Op("mlp.gate_up_proj", "matmul", (), (), product=Product(M, N, K, 1))
TOKENS = M // 8
"""Of a rank of tp, before they are gathered."""
CAST = Op("mlp_in.quantise", "elementwise", (), (), moved_bytes=TOKENS * K * 3)


def _seconds(stack: str, **settings: object) -> PartSeconds:
    workload = Workload(preset("llama-3.1-405b"), parse_cluster("64xh100"), 4096, 8, changed_stack(stack, settings))
    layout = Layout(dp=8, tp=8, zero_stage=1, precision="fp8")
    (shape,), _ = distinct_shapes(workload, LayoutTable.of([layout]))
    return price_ops(workload, shape, (CAST, PRODUCT))


def _law(stack: str, **options: object) -> float:
    workload = Workload(preset("llama-3.1-405b"), parse_cluster("64xh100"), 4096, 8, STACKS[stack])
    return matmul_seconds(workload.cluster.accelerator, M, N, K, dtype="fp8", **options)  # pyright: ignore


def _copy(num_bytes: float) -> float:
    return elementwise_seconds(parse_cluster("64xh100").accelerator, num_bytes)


def test_transformer_engine_casts_an_input_before_it_is_gathered_and_a_gradient_once() -> None:
    part = _seconds("megatron")
    assert part.product == pytest.approx(_law("megatron", casts=False))
    assert part.elementwise == pytest.approx(_copy(TOKENS * K * CAST_BYTES))
    assert part.input_gradient == pytest.approx(_law("megatron", kind="input-gradient", casts=False))
    assert part.input_elementwise == pytest.approx(_copy(M * N * CAST_BYTES)) and part.weight_elementwise == 0
    assert part.weight_gradient == pytest.approx(_law("megatron", kind="weight-gradient", output_bytes=8.0, casts=False))


def test_fsdp_casts_weights_in_every_pass_and_dynamic_scales_read_once_more() -> None:
    part = _seconds("torchtitan")
    weight = _copy(N * K * (CAST_BYTES - 1 + WIDE_BYTES))
    assert part.product == pytest.approx(_law("torchtitan", casts=False))
    assert part.elementwise == pytest.approx(_copy(TOKENS * K * (CAST_BYTES + WIDE_BYTES)) + weight)
    assert part.input_gradient == pytest.approx(_law("torchtitan", kind="input-gradient", casts=False))
    assert part.input_elementwise == pytest.approx(_copy(M * N * (CAST_BYTES + WIDE_BYTES)) + weight)


def test_scales_of_rows_are_found_and_cast_by_rows_for_one_product_and_by_columns_for_another() -> None:
    part, device = _seconds("torchtitan", **{"kernels.fp8_scaling": "row"}), parse_cluster("64xh100").accelerator
    columns = [columns_seconds(device, count * COLUMN_BYTES) for count in (N * K, TOKENS * K, M * N)]
    assert part.elementwise == pytest.approx(_copy(TOKENS * K * NARROW_BYTES) + _copy(N * K * NARROW_BYTES))
    assert part.input_elementwise == pytest.approx(_copy(M * N * NARROW_BYTES) + columns[0])
    added = _copy(N * K * (2 * 4 + 2))  # the weight's gradient in bf16 to its sum in fp32
    assert part.weight_elementwise == pytest.approx(columns[1] + columns[2] + added)
    for kind in ("forward", "input-gradient"):
        found = part.product if kind == "forward" else part.input_gradient
        assert found == pytest.approx(ROWWISE_OVER_TENSORWISE * _law("torchtitan", kind=kind, casts=False))


@pytest.mark.parametrize(("cluster", "measured"), [("8xh100-96", 7689.5 / 6768), ("8xb200", 10417 / 8640.5)])
def test_rowwise_costs_torchtitan_what_torchao_measured(cluster: str, measured: float) -> None:
    """Llama 3 8B by FSDP over 8, 8,192 tokens each: torchao's README of float8 (2025), and of mx_formats for B200."""
    found = {}
    for scaling in ("tensor", "row"):
        stack = changed_stack("torchtitan", {"kernels.fp8_scaling": scaling})
        workload = Workload(preset("llama-3.1-8b"), parse_cluster(cluster), 8192, 8, stack)
        layout = Layout(dp=8, zero_stage=3, precision="fp8", recompute="selective")
        found[scaling] = predict(workload, layout).step_seconds
    assert found["row"] / found["tensor"] == pytest.approx(measured, rel=0.05)


def test_ranks_of_tp_gather_what_is_scaled_by_rows_in_16_bits() -> None:
    sent = {}
    for scaling in ("tensor", "row"):
        stack = changed_stack("torchtitan", {"kernels.fp8_scaling": scaling})
        shape = Shape(1, 4096, "fp8", device="cuda", tp=8, kernels=stack.kernels)
        ops = block_work(preset("llama-3.1-8b"), 0, shape)
        sent[scaling] = sum(
            one.num_bytes for op in ops for one in op.collectives if one.kind == "all_gather" and one.when == "forward"
        )
    assert sent["row"] == 2 * sent["tensor"] > 0


def test_ours_casts_for_every_product() -> None:
    part = _seconds("ultrascale")
    assert part.product == pytest.approx(_law("ultrascale")) and part.elementwise == 0.0
    assert part.input_gradient == pytest.approx(_law("ultrascale", kind="input-gradient"))


def test_a_product_without_its_cast_is_the_product_with_it_less_the_copy() -> None:
    bf16 = [matmul_seconds(parse_cluster("8xh100").accelerator, M, N, K, casts=casts) for casts in (True, False)]
    assert bf16[0] == bf16[1]
    assert _law("megatron", casts=False) < _law("megatron")
