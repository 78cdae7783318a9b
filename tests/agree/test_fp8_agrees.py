"""Runs in fp8, planned and traced: messages for scales, products of 8 bits, and what waits for W in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.test_trace_agrees import LENGTH, MODEL, Traced, compared

from ultrascale.spec.layout import Layout
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
