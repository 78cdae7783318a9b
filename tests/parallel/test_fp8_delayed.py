"""Delayed scaling over ranks: one message a step, and then scales that one process has too, whichever axis made the ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from agree.axes import Case, RankStep
from agree.layouts import EXPERTS, MODEL
from agree.traffic import Key, watched
from parallel.fp8_blocks import blocks_as_in
from ranks import run_ranks
from torch import Tensor

from ultrascale.check.oracle.gathered import gather, parts
from ultrascale.description.layout import Layout
from ultrascale.work.fp8_slots import SLOT_BYTES, num_slots

LIMIT = 1e-12
DELAYED = Layout(precision="fp8", fp8_scaling="delayed", fp8_amax_history_len=3)
Tables = dict[str, Tensor]


class Found(NamedTuple):
    """Of a rank, after its last step."""

    gradients: Tables
    """Of the whole model, on rank 0."""
    history: Tables


def steps(rank: int, case: Case, given: Tables, count: int, compiled: bool = False) -> Found:
    """So many steps in float64 whose blocks multiply in fp8, from the history `given`; nothing is updated but that."""
    with blocks_as_in(DELAYED):
        step = RankStep(case, rank, compile_blocks=compiled)
    history = step.share.amax_history
    assert history is not None
    for name, table in history.tables():
        if given:
            table.copy_(given[name])
    history.begin(1 if given else 0)
    for number in range(count):
        for parameter in step.share.parameters():
            parameter.grad = None
        step.train(step.batches())
        if number + 1 < count or not given:
            history.accept()
    whole = gather(step.share, {"": parts(step.share, local_grad)})[""].whole
    return Found(whole, {name: table.clone() for name, table in history.tables()})


def local_grad(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@pytest.mark.parametrize("layout", [
    Layout(dp=2, cp=2, zero_stage=3),
    Layout(tp=2, dp=2, recompute="selective"),
    Layout(tp=2, pp=2, schedule="zb-h1"),
    Layout(dp=2, ep=2),
    Layout(tp=2, expert_tp=2, recompute="full"),
], ids=str)  # fmt: skip
def test_ranks_of_every_axis_are_one_process_to_the_last_digit_and_have_its_history(layout: Layout) -> None:
    """Over cp and ep too, where scales of the numbers at hand are each rank's own."""
    model = EXPERTS if layout.ep * layout.expert_tp > 1 else MODEL
    layout = replace(layout, precision="fp64", micro_batch_size=2)
    count = 4 if layout.pp > 1 else 2
    one = Case(model, Layout(precision="fp64", micro_batch_size=2), num_micro_batches=count * layout.dp)
    (first,) = run_ranks(1, steps, one, {}, 1)
    (expected,) = run_ranks(1, steps, one, first.history, 2)
    found = run_ranks(layout.world_size, steps, Case(model, layout, num_micro_batches=count), first.history, 2)
    errors = {name: float((found[0].gradients[name] - g).norm() / g.norm()) for name, g in expected.gradients.items()}
    assert {name: error for name, error in errors.items() if not error <= LIMIT} == {}
    tables = {name: table for rank in found for name, table in rank.history.items()}
    assert tables.keys() == expected.history.keys()
    for name, table in tables.items():
        torch.testing.assert_close(table, expected.history[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(cp=2, recompute="full")], ids=str)
def test_compiled_blocks_of_several_ranks_are_one_graph_each_and_have_the_scales_of_one_process(
    layout: Layout, compiled_by
) -> None:
    compiled_by("aot_eager", fullgraph=True)
    layout = replace(layout, precision="fp64", micro_batch_size=2)
    one = Case(MODEL, Layout(precision="fp64", micro_batch_size=2), num_micro_batches=2)
    (first,) = run_ranks(1, steps, one, {}, 1)
    (expected,) = run_ranks(1, steps, one, first.history, 2)
    found = run_ranks(2, steps, Case(MODEL, layout, num_micro_batches=2), first.history, 2, True)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found[0].gradients[name], gradient, rtol=LIMIT, atol=LIMIT * float(gradient.norm()))
    for name, table in expected.history.items():
        torch.testing.assert_close(found[1].history[name], table, rtol=1e-6, atol=0)


def sent(rank: int, case: Case) -> dict[Key, tuple[int, int]]:
    step = RankStep(case, rank)
    if step.share.amax_history is not None:
        step.share.amax_history.begin(1)
    with watched() as traffic:
        step.train(step.batches())
    return {key: (count, traffic.num_bytes[key]) for key, count in traffic.calls.items() if key.kind == "all_reduce"}


def test_all_scales_of_a_step_are_agreed_on_in_one_message() -> None:
    layout = replace(DELAYED, tp=2, micro_batch_size=2)
    now, delayed = (run_ranks(2, sent, Case(MODEL, replace(layout, fp8_scaling=s)))[0] for s in ("tensor", "delayed"))
    assert delayed == {Key("all_reduce", (2, 1), "forward"): (1, SLOT_BYTES * num_slots(MODEL, layout))}
    assert sum(count for count, _ in now.values()) > 20
