"""Products in fp8 on one CUDA device that has them: python -m pytest -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ultrascale.kernels.fp8 import fp8_matrices as fp8
from ultrascale.kernels.fp8.fp8_grouped import fp8_grouped_linear
from ultrascale.kernels.fp8.fp8_linear import fp8_linear
from ultrascale.kernels.fp8.fp8_matrices import NATIVE

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def products() -> None:
    if torch.cuda.get_device_capability() < NATIVE:
        pytest.skip("this device has no products of fp8")


def passes(layer: Any, *given: Tensor) -> list[Tensor]:
    """The result, and the gradients of all of `given`."""
    leaves = [one.clone().requires_grad_() for one in given]
    (out,) = layer(*leaves)
    out.backward(torch.ones_like(out) * torch.arange(out.shape[-1], device="cuda").to(out.dtype) / out.shape[-1])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def near_emulated(layer: Any, *given: Tensor) -> int:
    """Hold the passes to the same with products in fp32; how many products were native. Hopper's sums have 14 bits."""
    native, seen = torch._scaled_mm, []  # pyright: ignore[reportPrivateImportUsage]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", lambda *a, **options: (seen.append(a), native(*a, **options))[1])
        found = passes(layer, *given)
        patch.setattr(fp8, "multiplies_fp8", lambda device: False)
        expected = passes(layer, *given)
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).norm() < 1e-2 * other.double().norm()
    return len(seen)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("tokens, columns, rows", [(1024, 256, 384), (1021, 256, 384), (1, 256, 384), (33, 250, 381)])
def test_all_products_of_a_layer_are_native_whatever_its_sizes(tokens, columns, rows, scaling):
    hidden = torch.randn(1, tokens, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    assert near_emulated(lambda x, w: fp8_linear(x, [w], [], scaling), hidden, weight) == 3


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_all_products_of_experts_are_native_whatever_rows_they_have(scaling):
    counts = torch.tensor([3, 16, 0, 1, 77], device="cuda")
    rows = torch.randn(97, 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(5, 64, 128, device="cuda", dtype=torch.bfloat16)
    assert near_emulated(lambda x, w: fp8_grouped_linear(x, [w], counts, [], scaling), rows, weight) == 3 * 4
