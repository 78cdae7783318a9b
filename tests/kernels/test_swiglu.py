from functools import partial

import pytest
import torch
from torch.nn import functional as F

from ultrascale.kernels.swiglu import clamped_swiglu, geglu, swiglu


@pytest.mark.parametrize("ours, act", [(swiglu, F.silu), (geglu, partial(F.gelu, approximate="tanh"))], ids=["silu", "gelu"])
def test_values_and_gradients_equal_autograds(ours, act):
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    found, expected = ours(gate, up), act(gate) * up
    assert torch.equal(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (gate, up), grad), torch.autograd.grad(expected, (gate, up), grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("ours", [swiglu, geglu])
def test_only_gate_and_up_are_saved(ours):
    gate, up = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(gate, up)
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]


def test_the_clamped_form_and_its_gradients_are_those_of_plain_autograd_on_both_sides_of_the_limits():
    generator = torch.Generator().manual_seed(0)
    ours = [(6 * torch.randn(64, 5, dtype=torch.float64, generator=generator)).requires_grad_() for _ in range(2)]
    plain = [x.detach().clone().requires_grad_() for x in ours]
    low, near = plain[0].clamp(max=7.0), plain[1].clamp(-7.0, 7.0)
    expected = (near + 1) * (low * torch.sigmoid(1.702 * low))
    grad = torch.randn(64, 5, dtype=torch.float64, generator=generator)
    out = clamped_swiglu(*ours)
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)
    torch.autograd.backward([out, expected], [grad, grad])
    assert (plain[0].grad == 0).any() and (plain[1].grad == 0).any()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-13)
