"""Dropout is a function of the token and its place in the model: rates, independence, gradients, and the compiled form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ultrascale.kernels.dropout import dropout, dropped, token_keys

KEYS = torch.from_numpy(token_keys(np.arange(16), 64, seed=7))
WIDTH = 256


def deviations(rate: float, site: int) -> torch.Tensor:
    """[tokens, channels], of mean 0 and variance 1 if elements are dropped at `rate`."""
    return (dropped(KEYS, site, WIDTH, rate).double() - rate).flatten(0, 1) / (rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_elements_are_dropped_at_the_rate_and_independently_of_each_other(rate):
    """Every figure below is a standard normal number if they are."""
    z, other_site = deviations(rate, 3), deviations(rate, 4)
    pairs = [z[:, 1:] * z[:, :-1], z[:, 64:] * z[:, :-64], z[1:] * z[:-1], z[64:] * z[:-64], z * other_site]
    figures = [float(x.sum()) / x.numel() ** 0.5 for x in [z, *pairs]]
    assert max(map(abs, figures)) < 4, figures
    spread = [float(z.mean(0).std()) * z.shape[0] ** 0.5, float(z.mean(1).std()) * z.shape[1] ** 0.5]
    assert spread == pytest.approx([1, 1], abs=0.15)


def test_keys_differ_by_seed_sequence_and_place_and_by_nothing_else():
    assert len(np.unique(token_keys(np.arange(200), 300, seed=7))) == 200 * 300
    assert (token_keys(np.array([5, 3]), 300, seed=7)[1] == token_keys(np.arange(200), 300, seed=7)[3]).all()
    assert (token_keys(np.arange(4), 8, seed=7) != token_keys(np.arange(4), 8, seed=8)).all()
    assert (token_keys(np.arange(4), 16, seed=-1)[:, :8] == token_keys(np.arange(4), 8, seed=-1)).all()


def test_the_bits_are_these_for_ever():
    """A resumed run, on whatever version, goes on with the bits it began with."""
    first, second = token_keys(np.array([0, 1]), 2, seed=0).tolist()
    assert first == [2558736989570252433, 3400964856525257824]
    assert second == [4964578127960768432, 5067554077270220563]
    assert int(dropped(KEYS, 3, WIDTH, 0.1).sum()) == 26359


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_is_dropped_where_the_element_was_and_no_tensor_is_saved(dtype):
    x = torch.ones(16, 64, WIDTH, dtype=dtype, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = dropout(x, 0.25, KEYS, 3)
    y.backward(torch.full_like(y, 3))
    gone = dropped(KEYS, 3, WIDTH, 0.25)
    assert saved == [] and y.dtype == dtype and x.grad is not None
    assert (y == torch.where(gone, 0, torch.tensor(1 / 0.75, dtype=dtype))).all()
    assert (x.grad == torch.where(gone, 0, torch.tensor(3, dtype=dtype) * (1 / 0.75))).all()


def test_compiled_it_is_the_same_bits_and_compiles_once_for_all_sites(cpu_as_cuda):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter)
    def of(x: torch.Tensor, site: int) -> torch.Tensor:
        return dropout(x, 0.25, KEYS, site)

    x = torch.randn(16, 64, WIDTH)
    for site in range(1, 12):
        given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        of(given, site).sum().backward()
        dropout(plain, 0.25, KEYS, site).sum().backward()
        torch.testing.assert_close(given.grad, plain.grad)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 32), (torch.float64, 24), (torch.bfloat16, 24)])
def test_compiled_for_the_cpu_it_drops_the_same_elements(dtype, width):
    """By torch's own compiler, whose C++ gets the mask wrong: of one column in 32 where rows are summed (as a norm's gradient
    is), and of the last columns where elements are not as wide as the hash."""
    torch._dynamo.reset()
    keys = torch.from_numpy(token_keys(np.arange(2), 23, seed=7))
    x = torch.arange(1, 2 * 23 * width + 1).view(2, 23, width).to(dtype).requires_grad_()
    of = torch.compile(lambda x: (dropout(x, 0.5, keys, 3) * 2, dropout(x.detach(), 0.5, keys, 3).sum((0, 1))))
    out, sums = of(x)
    out.sum().backward()
    plain = dropout(x.detach(), 0.5, keys, 3)
    assert (out == plain * 2).all() and x.grad is not None
    assert ((x.grad == 0) == (plain == 0)).all()
    torch.testing.assert_close(sums, plain.sum((0, 1)))
