"""Products of fp8 on CUDA's terms, which take multiples of 16 of what they sum over: here with a stand-in that is as strict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ultrascale.kernels.fp8 import fp8_matrices as fp8
from ultrascale.kernels.fp8.fp8_grouped import scaled_groups, scaled_outer_groups
from ultrascale.kernels.fp8.fp8_linear import fp8_linear
from ultrascale.kernels.fp8.fp8_matrices import FORWARD, GRADIENT, Narrow, product

SIZES = [(32, 64, 48), (1021, 64, 48), (1, 64, 48), (32, 61, 48), (32, 64, 47), (3, 5, 1), (1, 1, 1)]


def strict(
    left: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, use_fast_accum: bool
) -> Tensor:
    """`torch._scaled_mm` as CUDA has it, which refuses what `_scaled_mm_out_cuda` does (aten/src/ATen/native/cuda)."""
    m, n = len(left), right.shape[1]
    assert left.is_contiguous() and right.t().is_contiguous()
    assert left.shape[1] % 16 == 0 and right.shape[0] % 16 == 0 and n % 16 == 0
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if not scale_a.numel() == scale_b.numel() == 1:
        assert scale_a.shape == (m, 1) and scale_b.shape == (1, n) and scale_a.is_contiguous() and scale_b.is_contiguous()
    assert not left.dtype == right.dtype == GRADIENT
    assert use_fast_accum == (scale_a.numel() > 1 or left.dtype == right.dtype == FORWARD)
    return ((left.float() @ right.float()) * scale_a * scale_b).to(out_dtype)


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether the device has products of fp8."""
    return lambda has: monkeypatch.setattr(fp8, "multiplies_fp8", lambda device: has)


@pytest.fixture
def native(cpu_as_cuda, multiplies, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Let products run as on a GPU that has them; the sizes of those that did."""
    seen: list[tuple[int, int, int]] = []

    def run(left: Tensor, right: Tensor, *rest: Tensor, **options: Any) -> Tensor:
        seen.append((len(left), left.shape[1], right.shape[1]))
        return strict(left, right, *rest, **options)

    multiplies(True)
    monkeypatch.setattr(torch, "_scaled_mm", run)
    return seen


def whole_numbers(rows: int, columns: int, scaling: str, dtype: torch.dtype = FORWARD) -> Narrow:
    """Of which every sum is exact, in whatever order it is made."""
    values = torch.randint(-4, 5, (rows, columns)).to(dtype)
    return Narrow(values, torch.exp2(torch.randint(-3, 4, (rows, 1) if scaling == "row" else (1, 1)).float()))


def both_ways(left: Narrow, right: Narrow, multiplies: Callable[[bool], None]) -> tuple[Tensor, Tensor]:
    """On tensor cores' terms, and emulated."""
    found = product(left, right, torch.bfloat16)
    multiplies(False)
    return found, product(left, right, torch.bfloat16)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_of_any_size_run_on_tensor_cores_and_give_what_emulated_ones_do(sizes, scaling, native, multiplies):
    m, k, n = sizes
    left, right = whole_numbers(m, k, scaling), whole_numbers(n, k, scaling)
    found, expected = both_ways(left, right, multiplies)
    assert torch.equal(found, expected) and found.is_contiguous()
    assert native == [(m, fp8.multiple(k), fp8.multiple(n))]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("tokens", [1024, 1021, 15])
def test_the_gradient_of_a_weight_sums_over_any_number_of_tokens(tokens, scaling, native, multiplies):
    """Its factors are turned, and those of rows have their scales in the other factor."""
    grads, given = (whole_numbers(tokens, width, scaling) for width in (48, 64))
    turned = [Narrow(one.values.t(), whole_numbers(one.values.shape[1], 1, scaling).scale) for one in (grads, given)]
    found, expected = both_ways(turned[0], turned[1], multiplies)
    assert torch.equal(found, expected)
    assert native == [(48, fp8.multiple(tokens), 64)]


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_all_three_products_of_a_layer_run_on_tensor_cores_whatever_the_length(scaling, native, multiplies):
    found = []
    for is_native in (True, False):
        torch.manual_seed(0)
        hidden = torch.randn(1, 61, 64, dtype=torch.bfloat16).requires_grad_()
        weight = torch.randn(48, 64, dtype=torch.bfloat16).requires_grad_()
        multiplies(is_native)
        (out,) = fp8_linear(hidden, [weight], [], scaling)
        out.backward(torch.randn(1, 61, 48, dtype=torch.bfloat16))
        assert hidden.grad is not None and weight.grad is not None
        found.append((out.detach(), hidden.grad, weight.grad))
    assert sorted(native) == sorted([(61, 64, 48), (61, 48, 64), (48, 64, 64)])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() < 4e-3 * other.float().norm()


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_groups_of_any_number_of_rows_run_on_tensor_cores(scaling, native, multiplies):
    counts = torch.tensor([3, 16, 0, 1])
    rows, wide = whole_numbers(20, 64, "row"), whole_numbers(20, 48, "row")
    matrices = whole_numbers(4 * 48, 64, "row")
    of_experts = torch.exp2(torch.arange(4.0)).view(4, 1, 1)
    scale, scales = (rows.scale, matrices.scale.view(4, 48, 1)) if scaling == "row" else (of_experts, of_experts)
    outer = (scales, torch.ones(4, 64, 1)) if scaling == "row" else (of_experts, of_experts)
    found = []
    for has in (True, False):
        multiplies(has)
        out = scaled_groups(rows.values, scale, matrices.values.view(4, 48, 64), scales, counts, torch.bfloat16)
        found.append((out, scaled_outer_groups(wide.values, outer[0], rows.values, outer[1], counts, torch.bfloat16)))
    assert [size for size in native if size[0] != 48] == [(3, 64, 48), (16, 64, 48), (1, 64, 48)]
    assert [size for size in native if size[0] == 48] == [(48, 16, 64)] * 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_nothing_to_multiply_and_wider_results_are_emulated(native):
    product(Narrow(torch.zeros(0, 16).to(FORWARD), torch.ones(0, 1)), whole_numbers(16, 16, "row"), torch.bfloat16)
    product(whole_numbers(16, 16, "row"), whole_numbers(16, 16, "row"), torch.float64)
    assert not native


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("sizes", SIZES[:3], ids=str)  # to fill up a tensor on CUDA wants a device, even of one without numbers
def test_torchs_own_check_of_shapes_on_cuda_lets_them_pass(sizes, scaling, multiplies):
    multiplies(True)
    m, k, n = sizes
    with FakeTensorMode():
        left, right = (torch.empty(rows, k, device="cuda", dtype=FORWARD) for rows in (m, n))
        scales = [torch.empty((rows, 1) if scaling == "row" else (1, 1), device="cuda") for rows in (m, n)]
        assert fp8.multiplied(left, scales[0], right, scales[1], torch.bfloat16).shape == (m, n)
        with pytest.raises(RuntimeError, match="divisible by 16"):
            short = torch.empty(16, 15, device="cuda", dtype=FORWARD)
            torch._scaled_mm(short, short.t(), scales[0], scales[1])  # pyright: ignore[reportPrivateImportUsage]
