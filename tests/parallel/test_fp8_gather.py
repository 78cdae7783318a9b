"""Weights that are gathered in fp8: half of the bytes, and the same bits as without, on every axis and in every scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from agree.axes import Case, RankStep
from agree.layouts import EXPERTS, MODEL
from agree.traffic import watched
from parallel.fp8_blocks import blocks_as_in
from ranks import run_ranks
from torch import Tensor

from ultrascale.check.oracle.gathered import gather, parts
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.parallel.share import local
from ultrascale.train.optimizers.optimizer import build_optimizer
from ultrascale.work.fp8_slots import weights_gathered_in_fp8

STEPS, LIMIT = 2, 1e-12
SMALL = replace(MODEL, num_hidden_layers=3)
SMALL_EXPERTS = replace(EXPERTS, num_hidden_layers=2)


class Found(NamedTuple):
    """Of a rank, after some steps."""

    losses: list[Tensor]
    weights: dict[str, Tensor]
    """This rank's parts."""
    gathered_bytes: int
    """Of parameters, in all steps."""


def trained(rank: int, case: Case) -> Found:
    """Some steps with updates, an evaluation after the first."""
    step = RankStep(case, rank)
    optimizer, history = build_optimizer(step.share, Optimizer()), step.share.amax_history
    losses = []
    with watched() as traffic:
        for number in range(STEPS):
            losses += step.passes.train(step.batches(), 1000)
            step.share.finish_gradients()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if history is not None:
                history.accept()
            if number == 0:
                losses += step.passes.evaluate(step.batches())
    sent = sum(size for key, size in traffic.num_bytes.items() if key.kind == "parameters")
    return Found(losses, {name: local(p).detach().clone() for name, p in step.share.named()}, sent)


def both(rank: int, cases: Sequence[Case]) -> list[tuple[Found, Found]]:
    """Without and with."""
    wider = [replace(case, layout=replace(case.layout, fp8_all_gather=True)) for case in cases]
    return [(trained(rank, case), trained(rank, other)) for case, other in zip(cases, wider, strict=True)]


def of(layout: Layout, scaling: str, **changes: object) -> Case:
    model = changes.pop("model", SMALL_EXPERTS if layout.ep * layout.expert_tp > 1 else SMALL)
    assert isinstance(model, Model)
    given = {"precision": "fp8", "fp8_scaling": scaling, **changes}
    return Case(model, replace(layout, **given), num_micro_batches=2 * layout.pp)


@pytest.mark.parametrize("cases", [
    (of(Layout(dp=2, zero_stage=3), "tensor", fp8_keep_blocks=1), of(Layout(dp=2, zero_stage=3, recompute="full"), "delayed"),
     of(Layout(cp=2, zero_stage=1, layers_per_bucket=2), "row"), of(Layout(dp=2, ep=2, zero_stage=2), "row")),
    (of(Layout(dp=3, zero_stage=3), "row"), of(Layout(dp=3, zero_stage=2), "delayed"),  # shards that are padded
     *(of(Layout(dp=3, zero_stage=3), scaling, model=SMALL_EXPERTS)
       for scaling in ("row", "tensor", "delayed"))),  # of rows of several experts
    (of(Layout(dp=2, tp=2, zero_stage=3, recompute="selective"), "tensor"),
     of(Layout(dp=4, dp_shard=2, zero_stage=3), "tensor"),
     of(Layout(dp=2, pp=2, schedule="zb-v", virtual_stages=2, zero_stage=3), "delayed"),
     of(Layout(dp=4, ep=2, zero_stage=3), "tensor"), of(Layout(dp=2, tp=2, expert_tp=2, zero_stage=3), "delayed")),
    pytest.param(  # the same axes in another scaling
        (of(Layout(dp=2, tp=2, zero_stage=3), "row"), of(Layout(dp=2, pp=2, schedule="zb-h1", zero_stage=2), "row"),
         of(Layout(dp=2, tp=2, expert_tp=2, zero_stage=3), "row")), marks=pytest.mark.nightly),
], ids=lambda cases: f"{cases[0].layout.world_size} ranks")  # fmt: skip
def test_losses_and_weights_are_those_of_a_gather_in_bf16_to_the_bit(cases: tuple[Case, ...]) -> None:
    for results in run_ranks(cases[0].layout.world_size, both, cases, timeout_seconds=280):
        for case, (without, found) in zip(cases, results, strict=True):
            assert all(torch.equal(*pair) for pair in zip(found.losses, without.losses, strict=True)), str(case)
            assert all(torch.equal(found.weights[name], w) for name, w in without.weights.items()), str(case)
            assert found.gathered_bytes < 0.9 * without.gathered_bytes, str(case)


def test_bytes_of_all_weights_of_products_are_halved() -> None:
    case = of(Layout(dp=2, zero_stage=1), "row")
    ((without, found),) = run_ranks(2, both, [case])[0]
    names = weights_gathered_in_fp8(case.model, replace(case.layout, fp8_all_gather=True))
    in_fp8 = sum(weight.numel for weight in weights(case.model) if weight.name in names)
    assert without.gathered_bytes - found.gathered_bytes == STEPS * in_fp8  # what an evaluation gathers serves the next step
    assert in_fp8 > 0.8 * sum(weight.numel for weight in weights(case.model) if weight.layer is not None)


def gradients(rank: int, case: Case, layout: Layout) -> dict[str, Tensor]:
    """Of a step in float64 whose blocks multiply in fp8 as `layout` says, whole, on rank 0."""
    with blocks_as_in(layout):
        step = RankStep(case, rank)
    assert layout.world_size == 1 or step.share.gathered_weights is not None
    step.train(step.batches())
    whole = gather(step.share, {"": parts(step.share, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)})
    return whole[""].whole


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_ranks_that_gather_in_fp8_are_one_process_in_fp8_to_the_last_digit(scaling: str) -> None:
    layout = of(Layout(dp=2, tp=2, zero_stage=3), scaling, fp8_all_gather=True, micro_batch_size=2).layout
    plain = replace(layout, precision="fp64", fp8_scaling="row", fp8_all_gather=False)
    one = Case(SMALL, Layout(precision="fp64", micro_batch_size=2), num_micro_batches=4)
    (expected,) = run_ranks(1, gradients, one, replace(one.layout, precision="fp8", fp8_scaling=scaling))
    found = run_ranks(4, gradients, Case(SMALL, plain, num_micro_batches=2), layout)[0]
    errors = {name: float((found[name] - whole).norm() / whole.norm()) for name, whole in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= LIMIT} == {}
