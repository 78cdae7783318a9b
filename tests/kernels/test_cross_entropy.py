import pytest
import torch
from torch.nn import functional as F

from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy
from ultrascale.work.work import chunk_rows


def inputs(dtype: torch.dtype, rows: int = 300, vocab: int = 37_000) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A vocabulary so large that the rows take several chunks, the last one short, and a seventh of them not counted."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 16, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab, 16, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets


def test_loss_and_gradients_equal_torchs_cross_entropy_of_all_logits():
    hidden, weight, targets = inputs(torch.float64)
    assert chunk_rows(300, 37_000, "cpu") == 128
    loss = linear_cross_entropy(hidden.view(2, 150, 16), weight, targets.view(2, 150))
    found = torch.autograd.grad(loss / 7, (hidden, weight))
    expected_loss = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    expected = torch.autograd.grad(expected_loss / 7, (hidden, weight))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_in_bf16_the_loss_is_fp32_and_gradients_are_rounded_once():
    hidden, weight, targets = inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss, (hidden, weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    logits = (hidden @ weight.t()).double()  # the model's own rounding of logits is not what is tested
    logits = logits.detach() + (wide[0] @ wide[1].t()) - (wide[0] @ wide[1].t()).detach()
    expected = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), wide)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert ((one - other).norm() / other.norm()).item() < 4e-3


def test_without_gradients_nothing_is_kept_and_the_loss_is_the_same():
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.grad_fn is None
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, targets).detach())


def test_only_the_two_gradients_are_saved():
    hidden, weight, targets = inputs(torch.float32)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, targets)
    assert saved == [(300, 16), (37_000, 16)]


def test_a_second_backward_pass_is_an_error_not_a_wrong_gradient():
    loss = linear_cross_entropy(*inputs(torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("target", [37_000, -1, -5])
def test_a_target_outside_the_vocabulary_raises(target):
    hidden, weight, targets = inputs(torch.float32)
    targets[5] = target
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, targets)


def test_no_valid_target_gives_zero_loss_and_zero_gradients():
    hidden, weight, targets = inputs(torch.float32, rows=5, vocab=11)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [loss.item(), *(grad.abs().sum().item() for grad in grads)] == [0, 0, 0]


def test_the_compiled_pass_gives_the_same_loss_and_gradients():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(8192, 16, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 8192, (300,), generator=generator)
    targets[::5] = -100
    results = []
    for compiled in (False, True):
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, targets, compiled=compiled)
        (loss / 7).backward()
        assert hidden.grad is not None and weight.grad is not None
        results.append((loss.detach(), hidden.grad.float(), weight.grad.float()))
    for plain, fused in zip(*results, strict=True):
        assert float((plain - fused).norm() / plain.norm()) < 5e-3
