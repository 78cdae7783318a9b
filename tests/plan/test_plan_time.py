"""First-order time: the FLOPs people know by heart, and what recomputation adds."""

from __future__ import annotations

import pytest

from ultrascale.plan.time import mean_context, model_flops_per_token, plan_time
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
