"""Attention's cores and the loss by slabs on one CUDA device: python -m pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.attention_cores import CoreRequirements
from ultrascale.description.layout import AttentionCore, Layout
from ultrascale.kernels.attention.attention_contest import AttentionShape
from ultrascale.kernels.attention.attention_contest import contest as attention_contest
from ultrascale.kernels.attention.attention_core import attention, attention_mask
from ultrascale.kernels.attention.flash_packages import MODULES, not_importable
from ultrascale.kernels.choice.fused_contest import contest as fused_contest
from ultrascale.kernels.choice.fused_contest import fused_shape
from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.gpu
LENGTH = 300


def documents() -> Tensor:
    return torch.stack([(torch.arange(LENGTH) // size).to("cuda") for size in (37, 300)])


def inputs(dtype: torch.dtype, *, sinks: bool) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, LENGTH, 8, 64), (2, LENGTH, 2, 64), (2, LENGTH, 2, 64), (2, LENGTH, 8, 64), *([(8,)] if sinks else [])]
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def results(run: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The result and the gradients of queries, keys, values and sinks. The fourth of `given` is the result's gradient."""
    query, key, value, grad, *sinks = given
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value, *sinks)]
    out = run(*leaves[:3], sinks=leaves[3] if sinks else None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def written_out(ids: Tensor | None, window: int | None) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None) -> Tensor:
        place = torch.arange(LENGTH, device="cuda")
        distance = place[:, None] - place
        seen = ((distance >= 0) & (distance < (window or LENGTH))).expand(2, LENGTH, LENGTH)
        seen = seen if ids is None else seen & (ids[:, :, None] == ids[:, None, :])
        key, value = (tensor.repeat_interleave(4, dim=2) for tensor in (key, value))
        scores = torch.einsum("bshe,bthe->bhst", query, key) / 8
        scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(2, -1, LENGTH, 1)), dim=-1)
        return torch.einsum("bhst,bthe->bshe", scores.softmax(-1)[..., :LENGTH], value)

    return run


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("told", "window"), [(True, None), (True, 50), (False, 50)])
@pytest.mark.parametrize(("core", "dtype"), [("varlen", torch.bfloat16), ("flex", torch.bfloat16), ("flex", torch.float32)])
def test_attention_without_a_mask_equals_the_softmax_written_out(core: AttentionCore, dtype, told, window, sinks):
    ids, given = documents() if told else None, inputs(dtype, sinks=sinks)
    mask = attention_mask(LENGTH, LENGTH, document_ids=ids, window=window, dtype=dtype, device=given[0].device, core=core)
    assert not isinstance(mask, Tensor)
    found = results(lambda q, k, v, **options: attention(q, k, v, mask, **options), given)
    expected = results(written_out(ids, window), [tensor.double() for tensor in given])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < tolerance


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_on_request_gradients_are_the_same_bits_every_time():
    given = inputs(torch.bfloat16, sinks=False)
    mask = attention_mask(LENGTH, LENGTH, document_ids=documents(), window=None, dtype=torch.bfloat16, device=given[0].device)
    first, second = (results(lambda q, k, v, **options: attention(q, k, v, mask, **options), given) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def unfused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


@pytest.mark.parametrize("compiled", [False, True])
def test_head_and_loss_of_llamas_vocabulary_take_less_than_15_percent_of_the_unfused_form(compiled):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(8192, 2048, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(128_256, 2048, device="cuda", generator=generator) / 45).bfloat16().requires_grad_()
    targets = torch.randint(128_256, (8192,), device="cuda", generator=generator)
    peaks, gradients = [], []
    for loss_of in (lambda *a: linear_cross_entropy(*a, compiled=compiled), unfused):
        torch.autograd.grad(loss_of(hidden, weight, targets), (hidden, weight))  # compiled, and cuBLAS's own memory taken
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients.append(torch.autograd.grad(loss_of(hidden, weight, targets), (hidden, weight)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del loss_of
    assert peaks[0] < 0.15 * peaks[1]
    for one, other in zip(*gradients, strict=True):
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 1e-2


@pytest.mark.parametrize(("documents", "window"), [(False, None), (True, None), (False, 64)])
def test_the_cores_that_take_part_run_and_agree(documents, window):
    shape = AttentionShape(2, 512, 8, 2, 64, 64, torch.bfloat16)
    wanted = CoreRequirements("cuda", "bf16", (window,), documents=documents)
    outcomes = attention_contest(shape, wanted, torch.device("cuda"), compiled=False)
    expected = {"varlen", "flex"} if documents or window else {"sdpa", "cudnn", "flex"}
    assert {name for name, one in outcomes.items() if isinstance(one, float)} >= expected, outcomes


@pytest.mark.parametrize("kernel", ["norm", "norm_of_sum", "rotary", "swiglu", "loss"])
def test_the_forms_of_a_fused_kernel_run_and_agree(kernel):
    model = preset("llama-3.2-1b")
    shape = fused_shape(model, Layout(), 1024, torch.bfloat16)
    outcomes = fused_contest(kernel, model, shape, torch.device("cuda"))
    assert isinstance(outcomes["torch"], float) and isinstance(outcomes["triton"], float), outcomes


@pytest.mark.parametrize("core", list(MODULES))
@pytest.mark.parametrize(("told", "window"), [(True, None), (True, 50), (False, 50), (False, None)])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_flash_attn_package_equals_the_softmax_written_out(core: AttentionCore, told, window, sinks):
    if reason := not_importable(core):
        pytest.skip(reason)
    ids, given = documents() if told else None, inputs(torch.bfloat16, sinks=sinks)
    mask = attention_mask(
        LENGTH, LENGTH, document_ids=ids, window=window, dtype=torch.bfloat16, device=given[0].device, core=core
    )
    found = results(lambda q, k, v, **options: attention(q, k, v, mask, **options), given)
    expected = results(written_out(ids, window), [tensor.double() for tensor in given])
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-2


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("told", [True, False])
def test_cores_that_stay_when_bits_must_repeat_give_the_same_bits(told):
    shape = AttentionShape(2, 512, 8, 2, 64, 64, torch.bfloat16)
    wanted = CoreRequirements("cuda", "bf16", (None,), documents=told, deterministic=True)
    outcomes = attention_contest(shape, wanted, torch.device("cuda"), compiled=False, bitwise=True)
    assert isinstance(outcomes["varlen" if told else "sdpa"], float), outcomes
    assert outcomes["cudnn"] != 0 and isinstance(outcomes["cudnn"], str)
