"""The loss that goes through the vocabulary slab by slab, and what the forms of head and loss hold at their peak."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.kernels.choice.device_kind import meta_stands_for
from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy
from ultrascale.kernels.loss.cross_entropy_columns import loss_by_columns
from ultrascale.measure.memory import LiveMemory
from ultrascale.work.ops import Shape
from ultrascale.work.work import chunk_rows, head_work, slab_columns

VOCAB, TOKENS = 128_256, 8192
"""Llama 3's vocabulary, and the tokens of a micro-batch."""


def inputs(dtype: torch.dtype, *, rows: int = 50, vocab: int = 211, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 6, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab, 6, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets


def swept(hidden: Tensor, weight: Tensor, targets: Tensor, columns: int, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of hidden and gradient of the weight."""
    loss, *gradients = loss_by_columns(hidden.detach(), weight.detach(), targets, columns, with_gradients=True, **options)
    of_hidden, of_weight = gradients
    assert of_hidden is not None and of_weight is not None
    return loss, of_hidden, of_weight


@pytest.mark.parametrize("columns", [1, 64, 211])
def test_slabs_of_any_width_give_torchs_loss_and_gradients(columns):
    hidden, weight, targets = inputs(torch.float64)
    found = swept(hidden, weight, targets, columns)
    loss = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    expected = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-13, atol=0)
    for one, other in zip(found[1:], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_in_bf16_the_gradient_of_the_weight_is_rounded_once_and_nearer_than_chunks_of_rows_bring_it():
    hidden, weight, targets = inputs(torch.bfloat16, rows=400, vocab=2000)
    logits = (hidden @ weight.t()).double()  # the model's own rounding of logits is not what is tested
    gradient = torch.softmax(logits, 1) - F.one_hot(targets.clamp(min=0), 2000)
    exact = (gradient * (targets != -100)[:, None]).bfloat16().double().detach().t() @ hidden.detach().double()
    by_slabs = swept(hidden, weight, targets, 256)[2]
    assert by_slabs.dtype == torch.bfloat16
    assert float((by_slabs.double() - exact).norm() / exact.norm()) < 2e-3  # rounding once: 2^-9 at most an element


def test_parts_of_a_vocabulary_that_hear_of_each_other_give_the_whole_loss_and_gradient():
    hidden, weight, targets = inputs(torch.float64)
    whole = swept(hidden, weight, targets, 64)
    cuts = [(0, 100), (100, 211)]
    rows: dict[int, Tensor] = {}

    def remember(number: int) -> Callable[[Tensor], Tensor]:
        def join(own: Tensor) -> Tensor:
            rows[number] = own
            return torch.stack([rows.get(other, own) for other in range(2)])

        return join

    for number, (first, end) in enumerate(cuts):  # once to learn each part's numbers
        swept(hidden, weight[first:end], targets, 64, first=first, join=remember(number))
    together = torch.stack([rows[0], rows[1]])
    parts = [swept(hidden, weight[a:b], targets, 64, first=a, join=lambda own: together) for a, b in cuts]
    for part in parts:
        torch.testing.assert_close(part[0], whole[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(parts[0][1] + parts[1][1], whole[1], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), whole[2], rtol=1e-11, atol=1e-13)


def test_compiled_passes_give_the_same_loss_and_gradients():
    hidden, weight, targets = inputs(torch.bfloat16, rows=60, vocab=512)  # two slabs of one shape
    plain, fused = swept(hidden, weight, targets, 256), swept(hidden, weight, targets, 256, compiled=True)
    for one, other in zip(plain, fused, strict=True):
        assert float((one.float() - other.float()).norm() / one.float().norm()) < 5e-3


def test_slabs_are_for_large_vocabularies_in_16_bits_on_cuda_and_bounded():
    assert slab_columns(TOKENS, VOCAB, 2, "cuda") == 4096
    assert slab_columns(TOKENS, VOCAB, 2, "cpu") is None
    assert slab_columns(TOKENS, VOCAB, 4, "cuda") is None
    assert chunk_rows(TOKENS, 8192, "cuda") == TOKENS and slab_columns(TOKENS, 8192, 2, "cuda") is None
    assert slab_columns(2**22, VOCAB, 2, "cuda") == 128


class MetaMemory(LiveMemory):
    """Counts tensors that have shapes alone."""

    def _count(self, tensor: Tensor, category: str) -> None:
        if (storage := tensor.untyped_storage())._cdata not in self._blocks:
            self._add(storage, category)


def unfused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def peak_bytes(loss_of: Callable[..., Tensor], hidden_size: int) -> int:
    """What forward and backward hold at most beside hidden and weight: on the meta device, standing for CUDA, in bf16."""
    with torch.device("meta"):
        hidden = torch.empty(TOKENS, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(VOCAB, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(TOKENS, dtype=torch.int64)
    with meta_stands_for("cuda"), MetaMemory(nn.Module()) as memory:
        loss_of(hidden, weight, targets).backward()
    given = sum(tensor.numel() * tensor.itemsize for tensor in (hidden, weight, targets))
    return memory.peak.total - given


@pytest.mark.parametrize(("hidden_size", "gib"), [(2048, 11.74), (4096, 11.74)])
def test_head_and_loss_take_less_than_15_percent_of_the_unfused_form(hidden_size, gib):
    whole, ours = peak_bytes(unfused, hidden_size), peak_bytes(linear_cross_entropy, hidden_size)
    assert whole == pytest.approx(gib * 2**30, rel=0.01)  # log-probabilities, their gradient and that of the logits, in fp32
    assert ours < 0.15 * whole


def test_real_steps_hold_what_the_meta_device_says():
    """A slab, a wide copy of it and its softmax; three sums."""
    tokens, vocab, d, columns = 512, 16_384, 32, 1024
    hidden, weight, targets = inputs(torch.bfloat16, rows=tokens, vocab=vocab)
    hidden, weight = torch.zeros(tokens, d, dtype=torch.bfloat16), torch.zeros(vocab, d, dtype=torch.bfloat16)
    with LiveMemory(nn.Module()) as memory:
        found = loss_by_columns(hidden, weight, targets, columns, with_gradients=True)
    given = sum(tensor.numel() * tensor.itemsize for tensor in (hidden, weight, targets))
    slab = tokens * columns * (2 + 4 + 4)
    sums = tokens * d * (4 + 2) + vocab * d * 2
    assert found.loss.item() == pytest.approx((targets != -100).sum().item() * math.log(vocab), rel=1e-6)
    assert memory.peak.total - given == pytest.approx(slab + sums, rel=0.03)


def test_the_planner_knows_the_room_of_slabs():
    model = preset("llama-3.2-1b")
    shape = Shape(1, TOKENS, "bf16", device="cuda")
    loss = head_work(model, shape)[-1]
    kept = sum(one.num_bytes for one in loss.makes[1:])
    assert kept + loss.scratch_bytes == pytest.approx(peak_bytes(linear_cross_entropy, model.hidden_size), rel=0.01)
    assert (loss.flops, loss.forward_products) == (8 * TOKENS * VOCAB * model.hidden_size, 2)
