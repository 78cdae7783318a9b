"""fp8 over tp, experts and schedules that cut backward passes: the numbers of one process in fp8.

Every factor is rounded to the bits that one process rounds it to. What is left is the order of sums: with float64 between and
inside products it is 1e-14; in bf16 partial sums are rounded once more, and a rounding that falls the other way is one step of
an 8-bit number in the next product.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agree.axes import Case as StepCase
from agree.axes import RankStep
from agree.layouts import EXPERTS, MODEL
from models.families import FAMILIES
from parallel.fp8_blocks import blocks_as_in
from parallel.tensor_cases import Case, divisible, errors_of
from ranks import run_ranks
from torch import Tensor

from ultrascale.check.oracle.gathered import gather, parts
from ultrascale.description.layout import Layout
from ultrascale.kernels.fp8.fp8_grouped import fp8_grouped_linear
from ultrascale.kernels.fp8.fp8_linear import fp8_linear
from ultrascale.kernels.fp8.fp8_matrices import Scaling
from ultrascale.parallel.precision import fp8_wires

LIMIT = 1e-12
PLAIN = Layout(precision="fp64")


def worst(world: int, cases: dict[str, Case]) -> dict[str, tuple[float, str]]:
    """Of every case the largest error on any rank, and of what."""
    of_ranks = run_ranks(world, errors_of, cases, timeout_seconds=120)
    return {name: max((error, what) for found in of_ranks for what, error in found[name].items()) for name in cases}


@pytest.mark.parametrize("tp, sequence_parallel, scaling", [(2, True, "row"), (2, False, "tensor"), (3, True, "tensor")])
def test_families_over_tp_compute_what_one_process_does_in_fp8(tp, sequence_parallel, scaling):
    """All but those of fewer key heads than ranks, whose gradients ranks round in shares."""
    models = {name: divisible(FAMILIES[name], tp) for name in ("llama-biases", "smollm3", "gpt2", "qwen3")}
    cases = {name: Case(model, sequence_parallel, length=19, fp8=scaling) for name, model in models.items()}
    cases["recomputed"] = replace(cases["smollm3"], recompute="selective")
    assert {name: found for name, found in worst(tp, cases).items() if not found[0] <= LIMIT} == {}


def test_a_compiled_block_over_tp_computes_what_one_process_does_in_fp8():
    case = Case(replace(FAMILIES["llama"], num_hidden_layers=1), length=19, fp8="row", compiled=True)
    for found in run_ranks(2, errors_of, {"": case}, timeout_seconds=300):
        assert max(found[""].values()) <= LIMIT


def test_ranks_that_share_a_key_head_round_shares_of_its_gradient():
    """The forward pass is one process's to the last digit."""
    case = Case(FAMILIES["llama-wide-heads"], length=19, fp8="row")
    for found in run_ranks(2, errors_of, {"": case}):
        assert found[""]["loss"] <= LIMIT < max(found[""].values()) < 0.2


def forget_other_ranks() -> None:
    fp8_wires.largest = lambda found, group: found  # pyright: ignore


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_scales_of_this_rank_alone_are_seen(scaling):
    case = Case(FAMILIES["smollm3"], length=19, fp8=scaling, fault=forget_other_ranks)
    for found in run_ranks(2, errors_of, {"": case}):
        assert found[""]["loss"] > 1e-6 and max(found[""].values()) > 1e-2


def gradients(rank: int, case: StepCase, scaling: Scaling) -> dict[str, Tensor]:
    """Of a step of the trainer in float64 whose blocks multiply in fp8, whole, on rank 0."""
    with blocks_as_in(Layout(precision="fp8", fp8_scaling=scaling)):
        step = RankStep(case, rank)
    step.train(step.batches())
    return gather(step.share, {"": parts(step.share, local_grad)})[""].whole


def local_grad(parameter: torch.nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def furthest(layout: Layout, scaling: Scaling) -> dict[str, float]:
    """How far a layout's gradients are from one process's, of weights of experts and of others."""
    model = EXPERTS if layout.ep * layout.expert_tp > 1 else MODEL
    layout = replace(layout, precision="fp64", micro_batch_size=2)
    count = 4 if layout.pp > 1 else 2
    one = StepCase(model, replace(PLAIN, micro_batch_size=2), num_micro_batches=count * layout.dp)
    (expected,) = run_ranks(1, gradients, one, scaling)
    found = run_ranks(layout.world_size, gradients, StepCase(model, layout, num_micro_batches=count), scaling)[0]
    errors = {name: float((found[name] - whole).norm() / whole.norm()) for name, whole in expected.items()}
    kinds = {kind: [e for name, e in errors.items() if (".experts." in name) == kind] for kind in (True, False)}
    return {"experts" if kind else "others": max(some, default=0.0) for kind, some in kinds.items()}


@pytest.mark.parametrize("layout, scaling", [
    (Layout(tp=2, ep=2), "row"),
    (Layout(tp=2, ep=2, sequence_parallel=False), "tensor"),
    (Layout(tp=2, expert_tp=2, recompute="selective"), "tensor"),
    (Layout(tp=2, expert_tp=2), "row"),
    (Layout(pp=2, schedule="zb-h1"), "row"),
    (Layout(dp=2, pp=2, schedule="zb-v", virtual_stages=2, zero_stage=2), "tensor"),
    (Layout(tp=2, pp=2, schedule="zb-h1"), "row"),
    (Layout(tp=2, pp=2, schedule="dualpipe-v", virtual_stages=2, sequence_parallel=False), "tensor"),
], ids=str)  # fmt: skip
def test_a_step_over_experts_and_with_backward_passes_cut_in_two_is_one_processes(layout: Layout, scaling: Scaling) -> None:
    assert max(furthest(layout, scaling).values()) <= LIMIT


def test_experts_over_ranks_with_sequences_of_their_own_round_rows_of_several_micro_batches_together() -> None:
    found = furthest(Layout(dp=2, ep=2), "row")
    assert found["others"] <= LIMIT and 1e-3 < found["experts"] < 0.05


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_each_experts_products_are_those_of_a_linear_layer_of_its_own(scaling: Scaling) -> None:
    counts = torch.tensor([5, 0, 1, 10])
    rows, weights = torch.randn(16, 24, requires_grad=True), [torch.randn(4, 8, 24, requires_grad=True) for _ in range(2)]
    biases = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    grads = [torch.randn(16, 8) for _ in range(2)]
    leaves = [rows, *weights, *biases]
    found = torch.autograd.grad(outs := fp8_grouped_linear(rows, weights, counts, biases, scaling), leaves, grads)
    parts = rows.split(counts.tolist())
    each = [
        fp8_linear(part, [w[e] for w in weights], [b[e] for b in biases], scaling) if len(part) else part.new_empty(2, 0, 8)
        for e, part in enumerate(parts)
    ]
    whole = [torch.cat([one[k] for one in each]) for k in range(2)]
    assert all(torch.equal(out, expected) for out, expected in zip(outs, whole, strict=True))
    for one, other in zip(found, torch.autograd.grad(whole, leaves, grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
