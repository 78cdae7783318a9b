import pytest
import torch
from torch.nn import functional as F

from ultrascale.kernels.norm import rms_norm


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in ((3, 5, 24), (24,), (3, 5, 24)))
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad.to(dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_equal_torchs_rms_norm(dtype, tolerance):
    x, weight, grad = inputs(dtype)
    found = rms_norm(x, weight, 1e-5)
    expected = F.rms_norm(x.double(), (24,), weight.double(), 1e-5)
    assert found.dtype == dtype
    pairs = [(found, expected)]
    pairs += zip(
        torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad.double()), strict=True
    )
    for one, other in pairs:
        assert ((one.double() - other).norm() / other.norm()).item() < tolerance


def test_only_the_input_the_weight_and_a_number_a_row_are_saved():
    x, weight, _ = inputs(torch.bfloat16)
    saved: list[tuple[tuple[int, ...], torch.dtype]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((tuple(t.shape), t.dtype)) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
    assert saved == [((3, 5, 24), torch.bfloat16), ((24,), torch.bfloat16), ((3, 5, 1), torch.float32)]
