"""Runs in fp8, planned and traced: messages for scales, products of 8 bits, and what waits for W in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.test_trace_agrees import EXPERTS, LENGTH, MODEL, PREDICTS, Traced, compared

from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.run import Batch, Data, Run

SHORT = replace(MODEL, num_hidden_layers=4, vocab_size=2048)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_weights_gradients_that_wait_over_tp_are_planned(scaling, sequence_parallel) -> None:
    layout = Layout(
        tp=2, pp=2, schedule="zb-h1", precision="fp8", fp8_scaling=scaling, sequence_parallel=sequence_parallel
    )  # fmt: skip
    run = Run(SHORT, layout=layout, batch=Batch(LENGTH, 4), data=Data(document_mask=False))
    for rank in (0, 2):
        _, wrong = compared(Traced(run, rank))
        assert not wrong


@pytest.mark.parametrize(
    "model, rank, layout",
    [
        (SHORT, 0, Layout(dp=2, zero_stage=3, micro_batch_size=2, recompute="full", precision="fp8")),
        (SHORT, 2, Layout(tp=2, pp=2, schedule="zb-h1", precision="fp8", fp8_keep_blocks=1)),
        (
            SHORT,
            0,
            Layout(tp=2, recompute="blocks", recompute_blocks=("selective+mlp", "selective+output+down"), precision="fp8"),
        ),
        (EXPERTS, 0, Layout(tp=2, expert_tp=2, micro_batch_size=2, precision="fp8", fp8_scaling="tensor")),
        (EXPERTS, 0, Layout(tp=2, pp=2, schedule="zb-h1", recompute="selective", precision="fp8")),
        (EXPERTS, 4, Layout(dp=4, pp=2, zero_stage=3, schedule="zb-h1", ep=2, precision="fp8", fp8_scaling="tensor")),
        (EXPERTS, 0, Layout(dp=2, ep=2, micro_batch_size=2, recompute="full", precision="fp8")),
        (PREDICTS, 0, Layout(dp=2, cp=2, zero_stage=1, ep=2, expert_tp=2, recompute="selective", precision="fp8")),
    ],
    ids=str,
)
def test_blocks_in_bf16_experts_and_recomputation_beside_fp8_are_planned(model: Model, rank: int, layout: Layout) -> None:
    run = Run(
        model, layout=layout, batch=Batch(LENGTH, 2 * layout.dp * layout.micro_batch_size), data=Data(document_mask=False)
    )
    _, wrong = compared(Traced(run, rank))
    assert not wrong
