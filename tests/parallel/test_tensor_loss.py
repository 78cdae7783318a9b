"""The loss over a vocabulary that is cut, in several chunks of rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy
from ultrascale.parallel.tensor import tensor_loss
from ultrascale.parallel.tensor.tensor_loss import vocabulary_cross_entropy
from ultrascale.parallel.tensor.tensor_ops import TensorParallel
from ultrascale.work.sharding.places import even_part

ROWS, WIDTH, VOCAB_SIZE = 50, 6, 211


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, ROWS, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB_SIZE, WIDTH, dtype=torch.float64, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCAB_SIZE, (1, ROWS), generator=generator)


def few_rows(num_rows: int, vocab_size: int, device: str) -> int:
    """A size of chunks that depends on the vocabulary as sharply as can be."""
    return 7 + vocab_size % 5


def few_columns(num_rows: int, vocab_size: int, itemsize: int, device: str) -> int:
    return 13


def loss_and_gradients(rank: int, by_slabs: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tensor_loss.chunk_rows = few_rows
    if by_slabs:
        tensor_loss.slab_columns = few_columns
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, targets = drawn()
    first, length = even_part(VOCAB_SIZE, group.size(), rank)
    own = weight.detach()[first : first + length].requires_grad_()
    loss = vocabulary_cross_entropy(
        hidden, own, targets, vocab_size=VOCAB_SIZE, tp=TensorParallel(group, sequence_parallel=False)
    )
    loss.backward()
    assert hidden.grad is not None and own.grad is not None
    return loss.detach(), hidden.grad, own.grad


@pytest.mark.parametrize("by_slabs", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_are_of_one_size_on_ranks_whose_parts_of_the_vocabulary_are_not(tp, by_slabs):
    hidden, weight, targets = drawn()
    expected = linear_cross_entropy(hidden, weight, targets)
    expected.backward()
    ranks = run_ranks(tp, loss_and_gradients, by_slabs)
    for loss, gradient, _ in ranks:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
        torch.testing.assert_close(gradient, hidden.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat([own for *_, own in ranks]), weight.grad, rtol=1e-11, atol=1e-13)
