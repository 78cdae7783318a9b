"""Attention over parts of the keys: out and log-sum-exp, and how parts join."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ultrascale.kernels.attention.attention_with_lse import additive_mask, attend, attend_backward, hidden_score, join
from ultrascale.kernels.choice import device_kind

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-5, torch.bfloat16: 3e-2}


def made(*, queries: int = 37, keys: int = 37, value_width: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2, and the gradient of the result; float64."""
    made = torch.Generator().manual_seed(0)
    shapes = ((2, 4, queries, 24), (2, 2, keys, 24), (2, 2, keys, value_width), (2, 4, queries, value_width))
    query, key, value, grad = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)
    return query, key, value, grad


def visible(kind: str, queries: int, keys: int) -> Tensor:
    """[1, queries, keys]; of "some" the second row sees nothing."""
    if kind == "causal":
        return torch.ones(1, queries, keys, dtype=torch.bool).tril()
    shown = torch.rand(1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.6
    shown[:, 1] = False
    return shown if kind == "some" else torch.ones_like(shown)


def expected(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, shown: Tensor) -> tuple[Tensor, ...]:
    """Softmax written out: out, lse, and gradients of the three; rows that see nothing give zeros."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    wide = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
    scores = (wide[0] @ wide[1].transpose(-1, -2) / math.sqrt(query.shape[-1])).masked_fill(~shown[:, None], -math.inf)
    out = scores.softmax(-1).nan_to_num() @ wide[2]
    sees = shown.any(-1)[:, None, :, None]
    (out * sees * grad).sum().backward()
    return out.detach(), scores.logsumexp(-1).detach(), *(x.grad for x in leaves if x.grad is not None)


def found(kind: str, device: str, dtype: torch.dtype, value_width: int, keys: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """What the kernels make, float64 on the CPU, and what they should."""
    tensors = made(keys=keys, value_width=value_width)
    shown = visible(kind, 37, keys)
    query, key, value, grad = (x.to(device, dtype) for x in tensors)
    options: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind == "some":
        options["mask"] = additive_mask(shown.to(device), dtype)
    out, lse = attend(query, key, value, **options)
    grads = attend_backward(grad, query, key, value, out, lse, **options)
    return [x.double().cpu() for x in (out, lse, *grads)], expected(*tensors, shown)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "keys"), [("causal", 37), ("all", 21), ("some", 37), ("some", 21)])
@pytest.mark.parametrize("value_width", [24, 16])
def test_out_lse_and_gradients_are_those_of_softmax_written_out(device, dtype, kind, keys, value_width):
    results, wanted = found(kind, device, dtype, value_width, keys)
    sees = visible(kind, 37, keys).any(-1)
    for result, right in zip(results[:2], wanted[:2], strict=True):
        at = sees[:, None].expand(right.shape[:3])
        assert float((result - right)[at].abs().max()) < TOLERANCE[dtype] * 2
    if kind != "some":  # a row that sees nothing is joined with others before any gradient is taken
        for result, right in zip(results[2:], wanted[2:], strict=True):
            assert float((result - right).abs().max() / right.abs().max()) < TOLERANCE[dtype]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_join_to_the_whole_and_their_gradients_add_up(device, dtype):
    tensors, shown = made(), visible("some", 37, 37) | torch.eye(37, dtype=torch.bool)
    query, key, value, grad = (x.to(device, dtype) for x in tensors)
    parts = [slice(0, 11), slice(11, 37)]
    masks = [additive_mask(shown[:, :, part].to(device), dtype) for part in parts]
    ways = [attend(query, key[:, :, part], value[:, :, part], mask=mask) for part, mask in zip(parts, masks, strict=True)]
    out, lse = ways[0][0].to(torch.promote_types(dtype, torch.float32), copy=True), ways[0][1].clone()
    join(out, lse, *ways[1])
    grads = [
        attend_backward(grad, query, key[:, :, part], value[:, :, part], out.to(dtype), lse, mask=mask)
        for part, mask in zip(parts, masks, strict=True)
    ]
    joined = [out, lse, grads[0][0] + grads[1][0], *(torch.cat((grads[0][i], grads[1][i]), 2) for i in (1, 2))]
    for result, right in zip(joined, expected(*tensors, shown), strict=True):
        assert float((result.double().cpu() - right).abs().max() / right.abs().max()) < TOLERANCE[dtype]


def test_a_row_that_sees_nothing_is_finite_and_weighs_nothing():
    query, key, value, _ = (x.float() for x in made())
    shown = torch.zeros(1, 37, 37, dtype=torch.bool)
    out, lse = attend(query, key, value, mask=additive_mask(shown, torch.float32))
    assert out.isfinite().all()
    assert (lse <= hidden_score(torch.float32)).all()
    whole, whole_lse = attend(query, key, value)
    kept, kept_lse = whole.clone(), whole_lse.clone()
    join(kept, kept_lse, out, lse)
    assert torch.equal(kept, whole) and torch.equal(kept_lse, whole_lse)


def test_plain_products_compute_what_kernels_do(monkeypatch):
    """They run where no kernel does: fp64 on CUDA."""
    fused = [found(kind, "cpu", torch.float64, 16, 37)[0] for kind in ("causal", "some", "all")]
    monkeypatch.setitem(device_kind._STANDS_FOR, "cpu", "cuda")
    plain = [found(kind, "cpu", torch.float64, 16, 37)[0] for kind in ("causal", "some", "all")]
    for ours, theirs in zip(plain, fused, strict=True):
        for result, right in zip(ours[1:], theirs[1:], strict=True):
            assert float((result - right).abs().max() / right.abs().max()) < 1e-13


@pytest.mark.parametrize("keys", [21, 48])
def test_rows_of_a_mask_on_cuda_begin_where_its_kernel_can_read(keys, cpu_as_cuda):
    mask = additive_mask(torch.ones(2, 5, keys, dtype=torch.bool), torch.bfloat16)
    assert mask.shape == (2, 1, 5, keys)
    assert mask.stride(2) % 16 == 0
