"""Casts to fp8 that products share are priced once: an input's for all that read it, a gradient's for both that use it."""

from __future__ import annotations

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.laws.compute import elementwise_seconds, matmul_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.blocks import CAST_BYTES, WIDE_BYTES, distinct_shapes, price_ops
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Op, Product

M, N, K = 4096, 13312, 16384
PRODUCT = Op("mlp.gate_up_proj", "matmul", (), (), product=Product(M, N, K, 1))
TOKENS = M // 8
"""Of a rank of tp, before they are gathered."""
CAST = Op("mlp_in.quantise", "elementwise", (), (), moved_bytes=TOKENS * K * 3)


def _seconds(stack: str) -> tuple[float, float, float, float]:
    workload = Workload(preset("llama-3.1-405b"), parse_cluster("64xh100"), 4096, 8, STACKS[stack])
    layout = Layout(dp=8, tp=8, zero_stage=1, precision="fp8")
    (shape,), _ = distinct_shapes(workload, LayoutTable.of([layout]))
    part = price_ops(workload, shape, (CAST, PRODUCT))
    return tuple(float(x[0]) for x in (part.product, part.elementwise, part.input_gradient, part.weight_gradient))  # pyright: ignore


def _law(stack: str, **options: object) -> float:
    workload = Workload(preset("llama-3.1-405b"), parse_cluster("64xh100"), 4096, 8, STACKS[stack])
    return matmul_seconds(workload.cluster.accelerator, M, N, K, dtype="fp8", **options)  # pyright: ignore


def _copy(num_bytes: float) -> float:
    return elementwise_seconds(parse_cluster("64xh100").accelerator, num_bytes)


def test_transformer_engine_casts_an_input_before_it_is_gathered_and_a_gradient_once() -> None:
    product, elementwise, inputs, weights = _seconds("megatron")
    assert product == pytest.approx(_law("megatron", casts=False))
    assert elementwise == pytest.approx(_copy(TOKENS * K * CAST_BYTES))
    assert inputs == pytest.approx(_law("megatron", kind="input-gradient", casts=False) + _copy(M * N * CAST_BYTES))
    assert weights == pytest.approx(_law("megatron", kind="weight-gradient", output_bytes=8.0, casts=False))


def test_fsdp_casts_weights_in_every_pass_and_dynamic_scales_read_once_more() -> None:
    product, elementwise, inputs, _ = _seconds("torchtitan")
    weight = _copy(N * K * (CAST_BYTES - 1 + WIDE_BYTES))
    assert product == pytest.approx(_law("torchtitan", casts=False))
    assert elementwise == pytest.approx(_copy(TOKENS * K * (CAST_BYTES + WIDE_BYTES)) + weight)
    gradient = _copy(M * N * (CAST_BYTES + WIDE_BYTES)) + weight
    assert inputs == pytest.approx(_law("torchtitan", kind="input-gradient", casts=False) + gradient)


def test_ours_casts_for_every_product() -> None:
    product, elementwise, inputs, _ = _seconds("ultrascale")
    assert product == pytest.approx(_law("ultrascale")) and elementwise == 0.0
    assert inputs == pytest.approx(_law("ultrascale", kind="input-gradient"))


def test_a_product_without_its_cast_is_the_product_with_it_less_the_copy() -> None:
    bf16 = [matmul_seconds(parse_cluster("8xh100").accelerator, M, N, K, casts=casts) for casts in (True, False)]
    assert bf16[0] == bf16[1]
    assert _law("megatron", casts=False) < _law("megatron")
