"""Activations of layouts whose plans were once apart from their traces, each for a cause of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.test_trace_agrees import (
    CAPPED,
    EXPERTS,
    GPT_OSS,
    LENGTH,
    MODEL,
    ODD_VOCABULARY,
    PREDICTS,
    TIED,
    Apart,
    Traced,
    compared,
)  # fmt: skip

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run

NEAR_PERCENT = 1.0
"""Well below what any of the causes made."""


def apart(
    model: Model, layout: Layout, rank: int = 0, *, length: int = LENGTH, micro_batches: int = 2, documents: bool = False
) -> Apart:
    """How far a plan is from its trace, of which all else agrees."""
    sequences = micro_batches * layout.dp * layout.micro_batch_size
    run = Run(model, layout=layout, batch=Batch(length, sequences), data=Data(document_mask=documents))
    found, wrong = compared(Traced(run, rank))
    assert not wrong
    return found


def near(found: Apart) -> bool:
    return max(map(abs, found)) < NEAR_PERCENT


@pytest.mark.parametrize("layout", [
    Layout(fp8_scaling="tensor"),
    Layout(fp8_scaling="row", tp=2),
    Layout(fp8_scaling="tensor", tp=2, sequence_parallel=False, recompute="full"),
    Layout(fp8_scaling="row", cp=2, pp=2, schedule="zb-h1"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("length", [1021, 1023])
def test_fp8_of_a_length_that_products_are_filled_up_from(length, layout):
    assert near(apart(MODEL, replace(layout, precision="fp8"), layout.world_size - 1, length=length))


def test_experts_on_one_rank_let_go_of_their_rows_before_results_are_summed():
    model = replace(PREDICTS, vocab_size=ODD_VOCABULARY)
    assert near(apart(model, Layout(dp=2, zero_stage=3, recompute="full", pp=2, schedule="afab"), micro_batches=3))


def test_a_stage_without_blocks_makes_no_mask():
    layout = Layout(
        pp=4, layers_per_stage=(2, 1, 1, 0), tp=4, sequence_parallel=False, micro_batch_size=2, recompute="selective"
    )
    assert near(apart(EXPERTS, layout, 15, length=1021, micro_batches=4, documents=True))


def test_sinks_keep_keys_and_values_as_few_as_they_are_where_kernels_repeat_them():
    assert near(apart(GPT_OSS, Layout(pp=4, schedule="afab"), micro_batches=8))


def test_weights_that_were_gathered_in_fp8_are_not_rounded_again():
    layout = Layout(
        dp=4, zero_stage=3, dp_shard=2, micro_batch_size=2, precision="fp8", fp8_scaling="delayed", fp8_keep_blocks=1,
        fp8_all_gather=True, tp=2, sequence_parallel=False, cp=4, pp=2, schedule="zb-h1",
    )  # fmt: skip
    assert near(apart(TIED, layout, 5, micro_batches=3))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_selective_recomputation_keeps_experts_products_beside_their_sums_with_biases(precision):
    layout = Layout(
        dp=2, zero_stage=3, recompute="selective", precision=precision, tp=4, sequence_parallel=False, pp=4, ep=4, expert_tp=2
    )  # fmt: skip
    assert near(apart(GPT_OSS, layout, 25, micro_batches=3))


def test_what_attention_over_cp_gathers_under_a_window_is_kept_once():
    assert near(apart(GPT_OSS, Layout(tp=2, cp=2, pp=4), micro_batches=8))


@pytest.mark.parametrize("tp", [1, 2])
def test_narrow_projections_of_latent_attention_stay_in_bf16(tp):
    assert near(apart(PREDICTS, Layout(tp=tp, precision="fp8")))


def test_rows_that_come_from_no_other_rank_are_in_the_order_of_experts_already():
    assert near(apart(EXPERTS, Layout(dp=2, precision="bf16", recompute="selective", tp=2, pp=2), length=1021))


def test_a_stage_lets_go_of_what_its_first_block_reads_where_checkpoints_are_cut():
    layout = Layout(
        tp=2, sequence_parallel=False, cp=2, cp_method="all-gather", pp=2, layers_per_stage=(3, 1), ep=2, recompute="full",
        partition_checkpoints=True, precision="fp16", zero_stage=2,
    )  # fmt: skip
    assert near(apart(CAPPED, layout, 2, micro_batches=3))


def test_gradients_that_are_cast_to_a_dtype_as_wide_are_there_beside_the_next_ones():
    layout = Layout(
        dp=2, zero_stage=1, recompute="full", precision="fp16", reduce_dtype="bf16", tp=2, sequence_parallel=False, cp=2,
        cp_method="all-to-all", pp=2, virtual_stages=2, schedule="breadth-first", ep=2,
    )  # fmt: skip
    assert near(apart(replace(EXPERTS, vocab_size=ODD_VOCABULARY), layout, 3, micro_batches=6))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_heads_of_values_narrower_than_those_of_queries_are_as_wide_as_kernels_want_them_over_cp(recompute):
    layout = Layout(dp=4, zero_stage=2, recompute=recompute, precision="bf16", cp=4, pp=4, ep=2)
    assert near(apart(replace(PREDICTS, vocab_size=ODD_VOCABULARY), layout, length=1023))


def test_masks_of_one_micro_batch_are_gone_before_the_next_ones():
    layout = Layout(cp=4, cp_method="all-to-all", precision="bf16")
    assert near(apart(replace(GPT_OSS, vocab_size=1000), layout, micro_batches=4))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_stage_of_an_embedding_alone_has_the_room_that_its_sum_over_tp_takes(sequence_parallel):
    layout = Layout(
        tp=2, sequence_parallel=sequence_parallel, pp=2, layers_per_stage=(0, 4), precision="fp16", micro_batch_size=2
    )
    assert near(apart(MODEL, layout, length=1024, micro_batches=3))


def test_rows_on_their_way_to_experts_are_there_beside_the_shared_expert():
    layout = Layout(
        dp=4, recompute="full", attention="sdpa", precision="fp8", fp8_scaling="delayed", fp8_all_gather=True, tp=4,
        sequence_parallel=False, cp=4, pp=4, ep=4,
    )  # fmt: skip
    assert near(apart(replace(PREDICTS, vocab_size=ODD_VOCABULARY), layout, length=1021))


@pytest.mark.parametrize("length", [1021, 1024])
def test_pieces_of_an_mlp_multiply_the_tokens_there_are(length):
    layout = Layout(recompute="every-k", precision="bf16", mlp_chunks=4, cp=2)
    assert near(apart(MODEL, layout, length=length))


def test_a_clamped_activation_takes_room_for_what_it_clamps():
    layout = Layout(
        dp=4, zero_stage=1, recompute="every-k", recompute_every=3, sequence_parallel=False, cp_method="ring+all-to-all",
        cp_heads=2, pp=4, expert_tp=2,
    )  # fmt: skip
    assert near(apart(GPT_OSS, layout, 4, length=1021))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parts_of_a_ring_are_joined_in_fp32(precision):
    layout = Layout(
        zero_stage=3, recompute="full", precision=precision, cp=4, cp_method="all-gather", pp=2, virtual_stages=2,
        schedule="dualpipe-v",
    )  # fmt: skip
    assert near(apart(MODEL, layout, 5, length=1023, micro_batches=4))


def test_experts_gathered_for_a_second_pass_are_unpacked_before_their_results_are_sent_on():
    layout = Layout(
        dp=4, zero_stage=3, micro_batch_size=2, recompute="full", attention="varlen", precision="fp16", reduce_dtype="bf16",
        tp=4, pp=4, schedule="afab", expert_tp=2,
    )  # fmt: skip
    assert near(apart(CAPPED, layout, micro_batches=3, documents=True))


def test_the_last_block_of_a_stage_is_gathered_before_what_is_outside_its_blocks():
    assert near(apart(MODEL, Layout(dp=2, zero_stage=3, tp=2, sequence_parallel=False, cp=2, pp=4)))


@pytest.mark.parametrize("dp", [1, 2])
def test_factors_in_fp8_stay_until_a_row_product_is_summed(dp):
    layout = Layout(
        dp=dp, zero_stage=1, micro_batch_size=2, recompute="full", precision="fp8", fp8_scaling="delayed", fp8_all_gather=True,
        tp=4, cp_method="ring+all-to-all", cp_heads=2, pp=4, schedule="zb-h1",
    )  # fmt: skip
    assert near(apart(replace(MODEL, vocab_size=ODD_VOCABULARY), layout, 1, micro_batches=3))


def test_parts_of_different_lengths_are_gathered_beside_the_whole():
    layout = Layout(dp=2, zero_stage=1, precision="bf16", tp=4, pp=4, ep=4)
    assert near(apart(replace(PREDICTS, vocab_size=ODD_VOCABULARY), layout, length=1023, micro_batches=3))
