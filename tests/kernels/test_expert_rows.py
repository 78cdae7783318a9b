import torch
from grads import grad_of

from ultrascale.kernels.expert_rows import spread, weighted_sum


def routed(dtype=torch.float64):
    """6 tokens with 2 choices each, in an order of experts; 3 of the 12 pairs are dropped."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(6, 4, dtype=dtype, generator=generator)
    weights = torch.rand(6, 2, dtype=dtype, generator=generator)
    pairs = torch.randperm(12, generator=generator)[:9]
    return tokens, weights, pairs


def test_rows_are_the_tokens_of_their_pairs():
    tokens, _, pairs = routed()
    assert torch.equal(spread(tokens, pairs, 2), tokens[pairs // 2])


def test_a_token_is_the_weighted_sum_of_its_rows_and_dropped_ones_add_nothing():
    tokens, weights, pairs = routed()
    rows = torch.randn(9, 4, dtype=torch.float64)
    expected = torch.zeros_like(tokens)
    for row, pair in zip(rows, pairs.tolist(), strict=True):
        expected[pair // 2] += weights.flatten()[pair] * row
    torch.testing.assert_close(weighted_sum(rows, pairs, weights), expected, rtol=0, atol=1e-15)


def test_gradients_are_those_of_numerical_differences():
    tokens, weights, pairs = routed()
    assert torch.autograd.gradcheck(lambda t: spread(t, pairs, 2), tokens.requires_grad_())
    rows = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r, w: weighted_sum(r, pairs, w), (rows, weights.requires_grad_()))


def test_narrow_rows_are_summed_wide():
    """256 + 1 + 1 in bf16 steps would stay 256; summed in fp32 it is 258."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert weighted_sum(rows, torch.arange(3), torch.ones(1, 3)).item() == 258
    token = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    spread(token, torch.arange(3), 3).backward(rows)
    assert grad_of(token).item() == 258
