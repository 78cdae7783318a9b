"""The FLOPs people know by heart, and what recomputation adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.plan.flops import hardware_flops_per_token, mean_context, model_flops_per_token


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
    none, full = (hardware_flops_per_token(model, Layout(recompute=way), s) for way in ("none", "full"))
    blocks = model_flops_per_token(model, s) - 6 * model.hidden_size * model.vocab_size
    not_again = 2 * model.num_hidden_layers * model.intermediate_size * model.hidden_size  # down_proj: nobody keeps its result
    assert full - none == pytest.approx(blocks / 3 - not_again)


def test_masked_documents_and_windows_cost_the_full_square_and_count_as_little_as_before() -> None:
    """Attention is 7/6 of its model FLOPs in hardware: its scores are computed again on the way back."""
    model, layout, s = preset("llama-3-8b"), Layout(), 8192
    square = 12 * model.num_hidden_layers * model.query_size * s
    products = model_flops_per_token(model, s, full_attention=True) - square
    windowed = replace(model, sliding_window=s // 2)
    assert hardware_flops_per_token(model, layout, s, documents=True) == pytest.approx(products + square * 7 / 6)
    assert hardware_flops_per_token(model, layout, s) == pytest.approx(products + square * 7 / 6 * (s + 1) / (2 * s))
    assert hardware_flops_per_token(windowed, layout, s) == pytest.approx(products + square * 7 / 6)
    assert hardware_flops_per_token(replace(model, sliding_window=s), layout, s) == hardware_flops_per_token(model, layout, s)
