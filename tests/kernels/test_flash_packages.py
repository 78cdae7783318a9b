"""The flash-attn packages: what they are told and what is made of their results, held to the softmax written out in fp64."""

from __future__ import annotations

import pytest
import torch
from kernels import flash_fakes
from kernels.test_attention_spans import IDS, inputs, written_out
from kernels.test_attention_with_lse import expected as softmax_written_out
from kernels.test_attention_with_lse import made, visible

from ultrascale.description.attention_cores import CoreRequirements
from ultrascale.kernels.attention import attention_contest, flash_packages
from ultrascale.kernels.attention.attention_contest import AttentionShape
from ultrascale.kernels.attention.attention_core import attention, attention_mask, causal_piece
from ultrascale.kernels.attention.attention_spans import Spans
from ultrascale.kernels.attention.attention_with_lse import attend, attend_backward, join
from ultrascale.kernels.attention.flash_packages import MODULES, flash_forward, not_importable

CPU = torch.device("cpu")


@pytest.fixture(params=list(MODULES))
def core(request, monkeypatch):
    keep = flash_fakes.install(monkeypatch, request.param)
    flash_fakes.CALLS.clear()
    yield request.param
    del keep


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(("groups", "value_dim", "sinks"), [(4, 8, False), (2, 8, True), (1, 5, True)])
def test_results_and_gradients_equal_the_softmax_written_out(core, window, documents, groups, value_dim, sinks):
    given, ids = inputs(groups, value_dim, sinks=sinks), IDS if documents else None
    mask = attention_mask(13, 13, document_ids=ids, window=window, dtype=torch.float64, device=CPU, core=core)
    assert isinstance(mask, Spans) and mask.core == core and (mask.ends is None) == (not documents)
    query, key, value, *rest = given
    found = attention(query, key, value, mask, sinks=rest[0] if rest else None, scale=0.4)
    wanted = written_out(given, ids, window)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    grad = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, given, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["causal", "all"])
def test_pieces_of_context_parallelism_have_the_right_log_sum_exp_and_gradients(core, kind):
    query, key, value, grad = made(value_width=20)
    options = {"is_causal": kind == "causal", "core": core}
    out, lse = attend(query, key, value, **options)
    found = out, lse, *attend_backward(grad, query, key, value, out, lse, **options)
    for one, other in zip(found, softmax_written_out(query, key, value, grad, visible(kind, 37, 37)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_pieces_join_to_the_whole(core):
    query, key, value, _ = made(keys=50)
    out, lse = attend(query, key[:, :, :37], value[:, :, :37], core=core)
    join(out := out.contiguous(), lse, *attend(query, key[:, :, 37:], value[:, :, 37:], core=core))
    whole, whole_lse = attend(query, key, value)
    torch.testing.assert_close((out, lse), (whole, whole_lse), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("steady", [True, False])
def test_gradients_are_asked_to_be_deterministic_where_torch_is(core, steady):
    given = inputs(2, 8, sinks=False)
    torch.use_deterministic_algorithms(steady)
    try:
        for ids in (None, IDS):
            mask = attention_mask(13, 13, document_ids=ids, window=None, dtype=torch.float64, device=CPU, core=core)
            attention(given[0], given[1], given[2], mask).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [{"deterministic": steady}] * 2 == flash_fakes.CALLS


def test_what_a_tracer_is_told_of_shapes_is_true(core):
    for shape, ends in (((3, 13, 4, 8), None), ((39, 4, 8), torch.tensor([0, 13, 39], dtype=torch.int32))):
        tensors = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
        real = flash_forward(*tensors, ends, 26, True, 0, 1.0, core)
        meta = flash_forward(
            *(x.to("meta") for x in tensors), None if ends is None else ends.to("meta"), 26, True, 0, 1.0, core
        )
        assert [one.shape for one in real] == [one.shape for one in meta]
        assert [one.stride() for one in real] == [one.stride() for one in meta]


def test_a_package_that_is_there_takes_part_and_one_that_is_wrong_is_out(core, monkeypatch):
    monkeypatch.setattr(
        attention_contest, "unsupported_reason", lambda core, wanted: "" if core in ("sdpa", *MODULES) else "left out"
    )
    shape, wanted = AttentionShape(1, 24, 4, 2, 8, 8, torch.float64), CoreRequirements("cpu", "bf16", (None, 5), documents=True)
    outcomes = attention_contest.contest(shape, wanted, CPU, compiled=False)
    assert {name for name, one in outcomes.items() if isinstance(one, float)} == {"sdpa", core}
    others = [name for name in MODULES if name != core]
    assert all(str(outcomes[name]).startswith(MODULES[name]) for name in others), outcomes
    cut = attention_contest.contest(shape, wanted._replace(cp=2), CPU, compiled=False)
    assert isinstance(cut[core], float)
    monkeypatch.setitem(flash_packages._FORWARD, core, lambda q, k, v, *rest: (q * 0, q[..., 0].transpose(-1, -2)))
    assert "off" in str(attention_contest.contest(shape, wanted._replace(cp=2), CPU, compiled=False)[core])


def test_a_piece_is_what_one_process_computes(core):
    query, key, value = (torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    torch.testing.assert_close(
        causal_piece(query, key, value, core), attention(query, key, value, None), rtol=1e-12, atol=1e-12
    )


def test_a_package_that_is_not_there_or_of_another_version_is_said_to_be():
    assert not_importable("flash-2") == "flash_attn.flash_attn_interface is not installed"
    assert not_importable("sdpa") == ""


def test_a_version_without_the_functions_is_told_from_one_that_is_missing(monkeypatch):
    keep = flash_fakes.install(monkeypatch, "flash-2")
    assert not_importable("flash-2") == ""
    delattr(keep, "_flash_attn_varlen_forward")
    assert not_importable("flash-2") == "flash_attn.flash_attn_interface is of a version that is not known here"
