import pytest
import torch

from ultrascale.kernels.attention.attention_core import attention, attention_mask

CPU = torch.device("cpu")


def visible(num_queries: int, num_keys: int, *, document_ids=None, window=None) -> torch.Tensor:
    """By the definition, pair by pair: [B, S, T]."""
    batch = 1 if document_ids is None else len(document_ids)
    seen = torch.zeros(batch, num_queries, num_keys, dtype=torch.bool)
    for row in range(batch):
        for i in range(num_queries):
            query = num_keys - num_queries + i
            for key in range(query + 1):
                near = window is None or query - key < window
                same = document_ids is None or document_ids[row, query] == document_ids[row, key]
                seen[row, i, key] = near and same
    return seen


def mask_of(num_queries: int, num_keys: int, **options) -> torch.Tensor | None:
    options = {"document_ids": None, "window": None} | options
    mask = attention_mask(num_queries, num_keys, dtype=torch.float64, device=CPU, core="auto", **options)
    assert mask is None or isinstance(mask, torch.Tensor)
    return mask


@pytest.mark.parametrize("window", [None, 1, 3, 6, 50])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("num_queries", [1, 4, 7])
def test_the_mask_hides_the_future_other_documents_and_what_is_left_of_the_window(num_queries, documents, window):
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0] * 7]) if documents else None
    mask = mask_of(num_queries, 7, document_ids=ids, window=window)
    expected = visible(num_queries, 7, document_ids=ids, window=window)
    if mask is None:
        assert num_queries == 7 and not documents and window in (None, 50)
    else:
        assert torch.equal(mask.squeeze(1) == 0, expected)
        assert (mask.squeeze(1)[~expected] == float("-inf")).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_equals_the_softmax_written_out_with_gradients(groups, window):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 7, heads, 8, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, groups, groups)
    )
    found = attention(query, key, value, mask_of(7, 7, window=window))
    repeated = [tensor.repeat_interleave(4 // groups, dim=2) for tensor in (key, value)]
    scores = torch.einsum("bshe,bthe->bhst", query, repeated[0]) / 8**0.5
    scores = scores.masked_fill(~visible(7, 7, window=window), float("-inf"))
    expected = torch.einsum("bhst,bthe->bshe", scores.softmax(-1), repeated[1])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    grad = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(
        torch.autograd.grad(found, (query, key, value), grad),
        torch.autograd.grad(expected, (query, key, value), grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_all_layers_save_one_mask():
    query = torch.randn(1, 7, 2, 8, requires_grad=True)
    mask = attention_mask(7, 7, document_ids=None, window=3, dtype=torch.float32, device=CPU)
    assert isinstance(mask, torch.Tensor)
    saved: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.add(t.data_ptr()) or t, lambda t: t):
        attention(query, query, query, mask)
        first = set(saved)
        attention(query, query, query, mask)
    assert mask.data_ptr() in first
    assert len(saved) == len(first) + 2  # a second output and logsumexp, nothing else


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("groups", "value_dim"), [(4, 8), (2, 8), (4, 5)])
def test_a_sink_draws_weight_and_has_no_value_with_gradients_of_it_too(groups, value_dim, documents):
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    query, key, value, sinks = random(2, 7, 4, 8), random(2, 7, groups, 8), random(2, 7, groups, value_dim), random(4)
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0] * 7]) if documents else None
    found = attention(query, key, value, mask_of(7, 7, document_ids=ids), sinks=sinks, scale=0.4)
    repeated = [tensor.repeat_interleave(4 // groups, dim=2) for tensor in (key, value)]
    scores = torch.einsum("bshe,bthe->bhst", query, repeated[0]) * 0.4
    scores = scores.masked_fill(~visible(7, 7, document_ids=ids).unsqueeze(1), float("-inf"))
    joined = torch.cat((scores, sinks[:, None, None].expand(2, -1, 7, 1)), dim=-1)
    expected = torch.einsum("bhst,bthe->bshe", joined.softmax(-1)[..., :-1], repeated[1])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    grad = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    inputs = (query, key, value, sinks)
    for one, other in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_values_narrower_than_queries_and_a_scale_of_ones_own_give_the_softmax_written_out():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 7, 4, 12, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    value = torch.randn(2, 7, 4, 8, dtype=torch.float64, generator=generator).requires_grad_()
    found = attention(query, key, value, None, scale=0.3)
    scores = torch.einsum("bshe,bthe->bhst", query, key) * 0.3
    expected = torch.einsum("bhst,bthe->bshe", scores.masked_fill(~visible(7, 7), float("-inf")).softmax(-1), value)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    inputs, grad = (query, key, value), torch.randn(found.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_narrow_values_and_results_are_saved_narrow_and_no_scores_at_all():
    query, key = (torch.randn(2, 16, 4, 12, requires_grad=True) for _ in range(2))
    value, sizes = torch.randn(2, 16, 4, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.numel()), lambda nothing: value):
        attention(query, key, value, None)
    assert sorted(sizes) == sorted([2 * 16 * 4 * 12, 2 * 16 * 4 * 12, 2 * 16 * 4 * 8, 2 * 16 * 4 * 8, 2 * 4 * 16])
