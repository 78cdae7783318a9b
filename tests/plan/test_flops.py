"""The FLOPs people know by heart, and what recomputation adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.plan.flops import hardware_flops, hardware_flops_per_token, mean_context, model_flops_per_token
from ultrascale.plan.memory.replay import rank_shape
from ultrascale.trace.planned import planned_rank
from ultrascale.work.ops import Shape


def test_the_playbooks_flops_per_token_of_a_llama_8b_come_out() -> None:
    """nanotron's formula, 3 (2 L h (h + 2 k d) + 4 L s h + 2 L h^2 + 6 L h f + 2 h V), the full square of attention."""
    m, s = preset("llama-3-8b"), 4096
    h, layers, kv = m.hidden_size, m.num_hidden_layers, m.key_value_size
    block = 2 * h * (h + 2 * kv) + 4 * s * h + 2 * h * h + 6 * h * m.intermediate_size
    expected = 3 * (layers * block + 2 * h * m.vocab_size)
    assert model_flops_per_token(m, s, full_attention=True) == expected


@pytest.mark.parametrize(("length", "window", "expected"), [(4, None, 2.5), (4, 2, 1.75), (4, 9, 2.5), (1, 1, 1.0)])
def test_a_token_sees_as_many_positions_as_counting_says(length: int, window: int | None, expected: float) -> None:
    counted = sum(min(position + 1, window or length) for position in range(length)) / length
    assert mean_context(length, window) == counted == expected


def test_full_recomputation_adds_a_forward_pass_of_the_blocks_without_its_last_product() -> None:
    model, s = preset("llama-3-8b"), 8192
    none, full = (hardware_flops_per_token(model, Layout(recompute=way), Shape(1, s)) for way in ("none", "full"))
    blocks = model_flops_per_token(model, s) - 6 * model.hidden_size * model.vocab_size
    not_again = 2 * model.num_hidden_layers * model.intermediate_size * model.hidden_size  # down_proj: nobody keeps its result
    assert full - none == pytest.approx(blocks / 3 - not_again)


def test_masked_documents_and_windows_cost_the_full_square_and_count_as_little_as_before() -> None:
    """Attention is 7/6 of its model FLOPs in hardware: its scores are computed again on the way back."""
    model, layout, s = preset("llama-3-8b"), Layout(), 8192
    shape = Shape(1, s)
    square = 12 * model.num_hidden_layers * model.query_size * s
    products = model_flops_per_token(model, s, full_attention=True) - square
    windowed = replace(model, sliding_window=s // 2)
    assert hardware_flops_per_token(model, layout, Shape(1, s, documents=True)) == pytest.approx(products + square * 7 / 6)
    assert hardware_flops_per_token(model, layout, shape) == pytest.approx(products + square * 7 / 6 * (s + 1) / (2 * s))
    assert hardware_flops_per_token(windowed, layout, shape) == pytest.approx(products + square * 7 / 6)
    plain = hardware_flops_per_token(model, layout, shape)
    assert hardware_flops_per_token(replace(model, sliding_window=s), layout, shape) == plain


def test_logits_that_the_loss_computes_twice_are_hardware_flops_as_in_the_plan_of_a_rank() -> None:
    """By slabs of the vocabulary (16 bits on CUDA) the head has four GEMMs, on a CPU three."""
    model, s = preset("llama-3-8b"), 8192
    run = Run(model, layout=Layout(precision="bf16"), batch=Batch(s, 1), data=Data(document_mask=False))
    on_gpu, on_cpu = (rank_shape(run.layout, s, documents=False, device=device) for device in ("cuda", "cpu"))
    by_kind, slower = (hardware_flops(model, run.layout, shape) for shape in (on_gpu, on_cpu))
    assert by_kind["recomputation"] == 2 * model.hidden_size * model.vocab_size
    assert slower["recomputation"] == 0
    planned = planned_rank(run, 0, "cuda")
    assert (by_kind["matrix products"] + by_kind["recomputation"]) * s == planned.flops
