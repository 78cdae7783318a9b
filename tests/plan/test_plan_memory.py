"""Planned memory of big models against what is known about them, and the shape of the plan itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.memory.replay import plan_fullest_rank, plan_memory

LLAMA = preset("llama-3-8b")


def planned(layout: Layout, *, sequences: int = 64, length: int = 4096, **more):
    return plan_memory(LLAMA, layout, sequence_length=length, sequences_per_batch=sequences, **more)


def test_between_steps_a_rank_of_stage_three_holds_twelve_bytes_a_parameter_over_the_ranks() -> None:
    plan = planned(Layout(dp=64, zero_stage=3, precision="bf16"))
    batch = plan.between_steps.by_category["other"]
    assert plan.between_steps.total - batch == num_parameters(LLAMA) * 12 / 64


@pytest.mark.parametrize(("stage", "bytes_each"), [(0, 12), (1, 12 / 64), (2, 12 / 64), (3, 12 / 64)])
def test_parameters_and_moments_are_cut_from_stage_one_on(stage: int, bytes_each: float) -> None:
    plan = planned(Layout(dp=64, zero_stage=stage, precision="bf16"))  # type: ignore[arg-type]
    state = plan.between_steps.by_category["parameters"] + plan.between_steps.by_category["optimizer"]
    assert state == num_parameters(LLAMA) * bytes_each


def test_what_a_block_keeps_is_told_in_the_order_of_its_operations_in_every_process() -> None:
    every = ["norm", "elementwise", "matmul", "attention"]
    for recompute, kinds in (("none", every), ("selective", every[1:])):  # queries and keys turned, but no norm
        layout = Layout(dp=64, precision="bf16", recompute=recompute)  # type: ignore[arg-type]
        assert list(planned(layout).saved_by_layer[0]) == ["residual", *kinds]


def test_stage_one_keeps_whole_fp32_gradients_over_an_accumulation_and_stage_two_does_not() -> None:
    layouts = [Layout(dp=16, zero_stage=stage, precision="bf16", recompute="full") for stage in (1, 2)]  # type: ignore[arg-type]
    one, two = (
        max(by_category["gradients"] for _, _, by_category in planned(layout, keeps_timeline=True).timeline)
        for layout in layouts
    )
    outside = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    assert one >= num_parameters(LLAMA) * 4
    assert two < num_parameters(LLAMA) * 4 / 16 + 2 * outside * 1.01


def test_a_block_keeps_as_much_as_the_formula_for_fused_attention_says() -> None:
    """bf16 bytes of a token: 8 h + 4 (heads x head dim) + 4 (kv heads x head dim) + 6 f + 4 heads, less 2 h of the residual's
    second copy, which is counted at the next block, and with 4 bytes for each of two norms."""
    h, f = LLAMA.hidden_size, LLAMA.intermediate_size
    block = planned(Layout(dp=64, precision="bf16")).saved_by_layer[0]
    expected = 8 * h + 4 * LLAMA.query_size + 4 * LLAMA.key_value_size + 6 * f + 4 * LLAMA.num_attention_heads + 2 * 4
    assert sum(block.values()) == 4096 * expected


def test_full_recomputation_keeps_one_residual_stream_a_block() -> None:
    block = planned(Layout(dp=64, precision="bf16", recompute="full")).saved_by_layer[0]
    assert block == {"residual": 4096 * LLAMA.hidden_size * 2}


def test_every_second_block_is_recomputed_by_every_k() -> None:
    layers = planned(Layout(dp=64, precision="bf16", recompute="every-k", recompute_every=2)).saved_by_layer
    assert layers[0] == layers[2] == {"residual": 4096 * LLAMA.hidden_size * 2}
    assert sum(layers[1].values()) > 8 * sum(layers[0].values())


def test_a_long_accumulation_peaks_where_one_of_three_micro_batches_does() -> None:
    layout = Layout(dp=8, zero_stage=2, precision="bf16")
    short, long = planned(layout, sequences=24), planned(layout, sequences=800)
    assert long.num_micro_batches == 100
    assert long.peak.total - long.by_category["other"] == short.peak.total - short.by_category["other"]


def test_document_masks_are_kept_once_for_all_blocks() -> None:
    layout = Layout(dp=64, zero_stage=3, precision="bf16")
    with_mask, without = (planned(layout, documents=documents, device="cpu") for documents in (True, False))
    batch = with_mask.by_category["other"] - without.by_category["other"]
    assert with_mask.peak.total - without.peak.total == 4096 * 4096 * 2 + batch


def test_on_cuda_a_mask_makes_grouped_keys_and_values_be_repeated_and_documents_told_to_the_kernel_do_not() -> None:
    layout = Layout(dp=64, zero_stage=3, precision="bf16", attention="sdpa")
    told = replace(layout, attention="auto")
    assert planned(told, documents=True).saved_by_layer[0] == planned(told, documents=False).saved_by_layer[0]
    with_mask, without = (sum(planned(layout, documents=documents).saved_by_layer[0].values()) for documents in (True, False))
    assert with_mask - without == 4096 * 2 * 2 * (LLAMA.query_size - LLAMA.key_value_size)


def test_sliding_windows_under_masks_need_one_of_their_own() -> None:
    model = replace(LLAMA, sliding_window=1024, max_window_layers=16, num_hidden_layers=32)
    for core, masks in (("sdpa", 1), ("auto", 0)):
        layout = Layout(dp=64, zero_stage=3, precision="bf16", attention=core)  # type: ignore[arg-type]
        plans = [plan_memory(m, layout, sequence_length=4096, sequences_per_batch=64, documents=True) for m in (model, LLAMA)]
        assert plans[0].peak.total - plans[1].peak.total == masks * 4096 * 4096 * 2


def test_a_batch_that_does_not_divide_names_the_nearest_that_does() -> None:
    with pytest.raises(SpecError, match=r"batch.sequences_per_batch: must be a multiple of .* = 16, is 30. The nearest is 32"):
        planned(Layout(dp=8, micro_batch_size=2), sequences=30)


def test_at_the_end_nothing_but_parameters_moments_and_the_batch_is_left() -> None:
    for stage in (0, 1, 2, 3):
        for recompute in ("none", "selective", "full", "every-k"):
            layout = Layout(dp=4, zero_stage=stage, recompute=recompute, precision="bf16", layers_per_bucket=3)  # type: ignore[arg-type]
            left = planned(layout, sequences=16).between_steps.by_category
            assert {name for name, num_bytes in left.items() if num_bytes} == {"parameters", "optimizer", "other"}


def test_dualpipe_holds_each_end_s_blocks_and_their_state_twice() -> None:
    """Rank r has stages r and pp - 1 - r, each of half of the micro-batches (DeepSeek-V3, section 3.2.1)."""
    layout = Layout(pp=4, schedule="1f1b", precision="bf16")
    one, both = (
        plan_fullest_rank(LLAMA, one, sequence_length=512, sequences_per_batch=8).between_steps.by_category
        for one in (layout, replace(layout, schedule="dualpipe"))
    )
    assert 1.5 < both["parameters"] / one["parameters"] < 2.5
    assert both["optimizer"] == 2 * both["parameters"]
