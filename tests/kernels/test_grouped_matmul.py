import pytest
import torch
from grads import grad_of
from operations import Operations
from torch.nn import functional as F

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.kernels import grouped_matmul
from ultrascale.kernels.choice import fused_contest, implementation
from ultrascale.kernels.grouped_matmul import grouped_linear


def plain(rows, weight, counts, bias):
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, weight[e], None if bias is None else bias[e]) for e, part in enumerate(parts)])


def inputs(dtype, counts, d=16, f=24, with_bias=True):
    torch.manual_seed(0)
    counts = torch.tensor(counts)
    rows = torch.randn(int(counts.sum()), d, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), f, d, dtype=dtype, requires_grad=True)
    bias = torch.randn(len(counts), f, dtype=dtype, requires_grad=True) if with_bias else None
    return rows, weight, counts, bias


@pytest.mark.parametrize("counts", [[3, 1, 0, 5], [0, 0, 9, 0], [1, 1, 1, 1], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_each_expert_multiplies_its_own_rows_and_gets_their_gradient(counts, with_bias, dtype, tolerance):
    ours, reference = inputs(dtype, counts, with_bias=with_bias), inputs(dtype, counts, with_bias=with_bias)
    out, expected = grouped_linear(*ours), plain(*reference)
    grad = torch.randn(expected.shape, dtype=dtype)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    out.backward(grad)
    expected.backward(grad)
    for one, other in zip(ours, reference, strict=True):
        if one is not None and one.requires_grad:
            torch.testing.assert_close(one.grad, torch.zeros_like(one) if other is None or other.grad is None else other.grad,
                                       rtol=tolerance, atol=tolerance)  # fmt: skip


def test_an_expert_without_rows_has_a_gradient_of_zeros_not_none():
    rows, weight, counts, bias = inputs(torch.float32, [4, 0])
    grouped_linear(rows, weight, counts, bias).sum().backward()
    assert grad_of(weight)[0].abs().sum() > 0
    assert grad_of(weight)[1].eq(0).all() and grad_of(bias)[1].eq(0).all()


def test_gradients_are_those_of_numerical_differences():
    rows, weight, counts, bias = inputs(torch.float64, [2, 0, 3], d=3, f=2)
    assert torch.autograd.gradcheck(
        lambda r, w, b: grouped_linear(r, w, counts, b), tuple(x for x in (rows, weight, bias) if x is not None)
    )


@pytest.mark.parametrize("width", [24, 23], ids=["aligned", "rows that are no multiple of 16 bytes"])
def test_the_grouped_kernel_and_the_loop_give_the_same_bits(width, cpu_as_cuda):
    results = []
    for form in ("torch", "loop"):
        rows, weight, counts, bias = inputs(torch.float32, [3, 0, 8, 1], d=16, f=width)
        with implementation.chosen("experts", form):
            out = grouped_linear(rows, weight, counts, bias)
            out.backward(torch.ones_like(out))
        results.append((out.detach(), grad_of(rows), grad_of(weight), grad_of(bias)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_run_s_experts_are_multiplied_by_what_is_faster_for_them(cpu_as_cuda):  # where there is a choice
    model = preset("mixtral-8x7b")
    shape = fused_contest.fused_shape(model, Layout(ep=4, expert_tp=2, dp=4, tp=2), 64, torch.float32)
    assert (shape.experts, shape.expert_rows, shape.inner) == (2, 128, 7168)
    shape = shape._replace(hidden=32, inner=48)
    outcomes = fused_contest.contest("experts", model, shape, torch.device("cpu"))
    assert [isinstance(outcomes[form], float) for form in ("torch", "loop")] == [True, True]
    rows, weight, counts, _ = inputs(torch.float32, [3, 1])
    with Operations("_grouped_mm") as grouped, implementation.chosen("experts", "loop"):
        looped = grouped_linear(rows, weight, counts)
    assert not grouped.inputs
    with grouped:
        assert torch.equal(looped, grouped_linear(rows, weight, counts))
    assert grouped.inputs


def test_torchs_grouped_kernel_runs_where_rows_are_aligned():
    rows, weight, *_ = inputs(torch.float32, [3, 1])
    assert grouped_matmul._runs_grouped(rows, weight.transpose(1, 2))
    assert not grouped_matmul._runs_grouped(rows.double(), weight.transpose(1, 2).double())
    assert not grouped_matmul._runs_grouped(rows[:, 1:], weight[:, :, 1:].transpose(1, 2))
