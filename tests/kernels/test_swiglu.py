import torch
from torch.nn import functional as F

from ultrascale.kernels.swiglu import swiglu


def test_values_and_gradients_equal_autograds():
    generator = torch.Generator().manual_seed(0)
    gate, up, grad = (torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    found, expected = swiglu(gate, up), F.silu(gate) * up
    assert torch.equal(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (gate, up), grad), torch.autograd.grad(expected, (gate, up), grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


def test_only_gate_and_up_are_saved():
    gate, up = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(gate, up)
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]
