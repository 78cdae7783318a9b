"""Activations of layouts whose plans were once apart from their traces, each for a cause of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.test_trace_agrees import EXPERTS, GPT_OSS, LENGTH, MODEL, ODD_VOCABULARY, PREDICTS, TIED, Apart, Traced, compared

from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.run import Batch, Data, Run

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
        dp=4, zero_stage=3, recompute="selective", precision=precision, tp=4, sequence_parallel=False, pp=4, ep=4, expert_tp=2
    )  # fmt: skip
    assert near(apart(GPT_OSS, layout, 25, micro_batches=3))


def test_what_attention_over_cp_gathers_under_a_window_is_kept_once():
    assert near(apart(GPT_OSS, Layout(tp=2, cp=2, pp=4), micro_batches=8))


@pytest.mark.parametrize("tp", [1, 2])
def test_narrow_projections_of_latent_attention_stay_in_bf16(tp):
    assert near(apart(PREDICTS, Layout(tp=tp, precision="fp8")))
