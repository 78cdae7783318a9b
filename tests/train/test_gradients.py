"""Norm, clipping, decay groups, and gradients seen before they are summed."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from models.families import FAMILIES as DENSE_FAMILIES
from models.families import GPT_OSS

from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import Share
from ultrascale.train.optimizers.gradients import clip_gradients, watched_gradients
from ultrascale.train.optimizers.optimizer import build_optimizer

FAMILIES = DENSE_FAMILIES | {"gpt-oss": GPT_OSS}


def share_of(family: str) -> Share:
    return build_share(FAMILIES[family], Layout(), Ranks(0, 1, torch.device("cpu")), seed=0)


def share_with_gradients(family: str) -> Share:
    torch.manual_seed(0)
    share = share_of(family)
    for parameter in share.parameters():
        parameter.grad = torch.randn_like(parameter)
    return share


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gradient_norm_on_one_process_is_torchs(family):
    share = share_with_gradients(family)
    expected = torch.nn.utils.clip_grad_norm_(share.parameters(), float("inf"))
    assert float(share.gradient_norm()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("part", [0.01, 0.9, 1.1, None])
def test_clipping_is_torchs(part):
    """Far above the limit and just above it, and just below."""
    ours, theirs = share_with_gradients("llama"), share_with_gradients("llama")
    norm = float(ours.gradient_norm())
    limit = None if part is None else part * norm
    clip_gradients(ours.parameters(), norm, limit)
    if limit is not None:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_norms_and_biases_do_not(family):
    model = FAMILIES[family]
    share = share_of(family)
    optimizer = build_optimizer(share, Optimizer(weight_decay=0.2))
    name_of = {parameter: name for name, parameter in share.named()}
    decays = {name_of[p]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    is_matrix = {weight.name: weight.name.endswith(".weight") and "norm" not in weight.name for weight in weights(model)}
    assert decays == {name: 0.2 if decays else 0.0 for name, decays in is_matrix.items()}  # neither biases nor sinks


def test_adamw_is_fused_and_has_its_moments_before_the_first_step():
    optimizer = build_optimizer(share_with_gradients("llama"), Optimizer())
    assert all(group["fused"] for group in optimizer.param_groups)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.95)] * 2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_gradient_is_seen_once_a_backward_pass_before_it_is_added_to_others(family):
    decoder = Decoder(FAMILIES[family])
    tokens = torch.randint(0, 97, (2, 8))
    seen: list[tuple[str, torch.Tensor]] = []
    with watched_gradients([decoder], lambda name, gradient: seen.append((name, gradient.clone()))):
        for _ in range(2):
            decoder(tokens, targets=tokens).backward()
    decoder(tokens, targets=tokens).backward()  # no longer watched
    names = [name for name, _ in decoder.named_parameters()]
    assert sorted(name for name, _ in seen) == sorted([*names, *names])
    for name, gradient in seen:
        torch.testing.assert_close(gradient * 3, cast(torch.Tensor, decoder.get_parameter(name).grad))


@pytest.mark.catalogue(50)
def test_the_norm_of_large_gradients_is_exact_to_rounding():
    share = build_share(FAMILIES["llama"], Layout(), Ranks(0, 1, torch.device("cpu")), seed=0)
    parameter = torch.nn.Parameter(torch.empty(3_000_000))
    parameter.grad = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    share.local_parameters = [share.local_parameters[0]._replace(parameter=parameter)]
    assert float(share.gradient_norm()) == pytest.approx(float(parameter.grad.double().norm()), rel=1e-6)
    assert float(torch.nn.utils.get_total_norm([parameter.grad])) != pytest.approx(
        float(parameter.grad.double().norm()), rel=1e-6
    )
