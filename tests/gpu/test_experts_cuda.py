"""The CPU's claims on experts, latent attention and sinks again on one CUDA device: python -m pytest -m gpu."""

from __future__ import annotations

import pytest
import torch
from grads import grad_of
from models.families import EXPERT_FAMILIES

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.grouped_matmul import grouped_linear
from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import initialise

pytestmark = pytest.mark.gpu


def build(model: Model, dtype: torch.dtype, device: str) -> Decoder:
    decoder = Decoder(model)
    initialise(decoder, model, seed=1)
    return decoder.to(dtype).to(device)


@pytest.mark.usefixtures("angles_of_the_cpu")
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_loss_and_every_gradient_are_the_cpus(family, dtype, tolerance):
    model = EXPERT_FAMILIES[family]
    tokens = torch.randint(model.vocab_size, (2, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for device in ("cpu", "cuda"):
        decoder = build(model, dtype, device)
        loss = decoder(tokens.to(device), targets=tokens.to(device))
        loss.backward()
        found.append({"loss": loss.detach().cpu()} | {name: grad_of(p).cpu() for name, p in decoder.named_parameters()})
    for name, expected in found[0].items():
        atol = tolerance * expected.abs().max().item()
        torch.testing.assert_close(found[1][name], expected, rtol=tolerance, atol=atol, msg=name)


@pytest.mark.parametrize("counts", [[32, 0, 16, 80], [0, 0, 128, 0], [33, 0, 18, 77], [1, 3, 0, 13]], ids=str)
def test_grouped_products_in_bf16_are_those_of_each_expert_and_leave_zeros_where_one_has_no_rows(counts):
    torch.manual_seed(0)
    sizes = torch.tensor(counts, device="cuda")
    rows = torch.randn(sum(counts), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(counts), 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = grouped_linear(rows, weight, sizes)
    expected = torch.cat([part.float() @ weight[e].float().t() for e, part in enumerate(rows.split(counts))])
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-1)
    ours = torch.autograd.grad(out.float().square().sum(), (rows, weight))
    plain = torch.autograd.grad(expected.square().sum(), (rows, weight))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=5e-2, atol=0.02 * other.abs().max().item())
    assert all(ours[1][e].eq(0).all() for e, count in enumerate(counts) if not count)
