"""Runs in fp8, planned and traced: messages for scales, products of 8 bits, what waits for W in 8 bits and is gathered so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.axes import Case
from agree.layouts import EXPERTS as FEW_EXPERTS
from agree.layouts import MODEL as SMALL
from agree.test_trace_agrees import EXPERTS, GPT_OSS, LENGTH, MODEL, PREDICTS, Traced, compared
from agree.test_traffic_agrees import sent_by
from ranks import run_ranks

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.plan.memory.tally import Traffic, TrafficKey
from ultrascale.trace.planned import planned_rank

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
        (replace(GPT_OSS, num_hidden_layers=2), 1, Layout(dp=2, ep=2, precision="fp8", fp8_scaling="delayed")),
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


@pytest.mark.parametrize(
    "model, rank, layout",
    [
        (SHORT, 0, Layout(dp=2, zero_stage=3, micro_batch_size=2, recompute="full")),
        (SHORT, 1, Layout(dp=4, dp_shard=2, zero_stage=3, tp=2, fp8_scaling="tensor", fp8_keep_blocks=1)),
        (SHORT, 2, Layout(dp=2, pp=2, zero_stage=2, schedule="zb-h1", fp8_scaling="delayed")),
        (EXPERTS, 3, Layout(dp=4, ep=2, tp=2, expert_tp=2, zero_stage=3)),
        (EXPERTS, 1, Layout(dp=3, zero_stage=1, fp8_scaling="tensor")),
        (EXPERTS, 2, Layout(dp=16, zero_stage=3)),
        (PREDICTS, 0, Layout(dp=2, cp=2, zero_stage=1, ep=2, expert_tp=2, recompute="selective")),
    ],
    ids=str,
)
def test_weights_gathered_in_fp8_are_planned(model: Model, rank: int, layout: Layout) -> None:
    layout = replace(layout, precision="fp8", fp8_all_gather=True)
    run = Run(
        model, layout=layout, batch=Batch(LENGTH, 2 * layout.dp * layout.micro_batch_size), data=Data(document_mask=False)
    )
    _, wrong = compared(Traced(run, rank))
    assert not wrong


@pytest.mark.parametrize("layout", [
    Layout(dp=2, tp=2, zero_stage=3),
    Layout(dp=2, tp=2, zero_stage=3, fp8_scaling="tensor"),
    Layout(dp=4, ep=2, zero_stage=2, fp8_scaling="delayed"),
], ids=str)  # fmt: skip
def test_messages_of_gathers_in_fp8_and_of_their_scales_are_planned(layout: Layout) -> None:
    """What ranks really send, over gloo."""
    layout = replace(layout, precision="fp8", fp8_all_gather=True)
    case = Case(FEW_EXPERTS if layout.ep > 1 else SMALL, layout)
    data = Data(document_mask=False)
    run = Run(case.model, layout=layout, batch=Batch(case.length, 2 * layout.dp), data=data)
    for rank, found in enumerate(run_ranks(4, sent_by, case)):
        planned = planned_rank(run, rank, "cpu")
        assert planned is not None
        totals: dict[TrafficKey, Traffic] = {}
        for key, (count, size) in found.items():
            name = {"parameters": "all_gather"}.get(key.kind)
            if name is not None:
                before = totals.get(TrafficKey(name, *key.group), Traffic(0, 0))
                totals[TrafficKey(name, *key.group)] = Traffic(before.count + count, before.num_bytes + size)
        shards = {way: traffic for way, traffic in planned.traffic.items() if way in totals}
        assert totals == shards and totals
        over = {key.group: size for key, (_, size) in found.items() if key.kind == "all_reduce" and key.group == (2, 2)}
        scales = planned.traffic.get(TrafficKey("all_reduce", 2, 2), Traffic(0, 0)).num_bytes
        assert sum(over.values()) == scales
        assert (scales > 0) == (layout.fp8_scaling != "delayed")


def test_a_stage_without_blocks_in_fp8_joins_in_the_message_of_delayed_scales() -> None:
    layout = Layout(
        pp=2, layers_per_stage=(3, 1), precision="fp8", fp8_scaling="delayed", fp8_keep_blocks=1, micro_batch_size=2
    )  # fmt: skip
    run = Run(SHORT, layout=layout, batch=Batch(LENGTH, 8), data=Data(document_mask=False))
    for rank in (0, 1):
        _, wrong = compared(Traced(run, rank))
        assert not wrong
