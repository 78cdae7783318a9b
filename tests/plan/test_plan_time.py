"""First-order time: the FLOPs people know by heart, and what recomputation adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.plan.time import hardware_flops_per_token, mean_context, model_flops_per_token, plan_time
from ultrascale.spec.layout import Layout
from ultrascale.spec.model_presets import preset


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


def test_a_step_takes_its_flops_over_the_achievable_rate() -> None:
    time = plan_time(
        preset("llama-3-8b"), Layout(dp=64, precision="bf16"), sequence_length=8192, sequences_per_batch=512,
        peak_flops_per_second=1e15, achievable_fraction=0.5,
    )  # fmt: skip
    assert time.seconds_per_step == pytest.approx(time.hardware_flops_per_token * 8192 * 512 / (64 * 0.5e15))
    assert time.hfu == pytest.approx(0.5)
    assert time.mfu == pytest.approx(0.5 * time.model_flops_per_token / time.hardware_flops_per_token)
    assert time.seconds_for(time.tokens_per_second) == pytest.approx(1.0)


def test_recomputation_lowers_mfu_but_not_hfu() -> None:
    none, full = (
        plan_time(
            preset("llama-3-8b"),
            Layout(dp=8, recompute=way),  # type: ignore[arg-type]
            sequence_length=8192,
            sequences_per_batch=8,
            peak_flops_per_second=1e15,
            achievable_fraction=0.5,
        )
        for way in ("none", "full")
    )
    assert none.hfu == pytest.approx(full.hfu)
    assert full.mfu < none.mfu * 0.85


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


def test_masking_documents_lengthens_the_step_and_lowers_mfu() -> None:
    masked, plain = (
        plan_time(
            preset("llama-3-8b"), Layout(dp=8), sequence_length=8192, sequences_per_batch=8, peak_flops_per_second=1e15,
            achievable_fraction=0.5, documents=documents,
        )
        for documents in (True, False)
    )  # fmt: skip
    ratio = masked.hardware_flops_per_token / plain.hardware_flops_per_token
    assert ratio > 1.1
    assert masked.seconds_per_step == pytest.approx(plain.seconds_per_step * ratio)
    assert masked.mfu == pytest.approx(plain.mfu / ratio)
    assert masked.hfu == pytest.approx(plain.hfu)
