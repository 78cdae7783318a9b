"""Attention told where documents end, and FlexAttention's blocks: both held to the softmax written out, with gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.kernels.attention.attention_core import attention, attention_mask
from ultrascale.kernels.attention.attention_flex import FlexMask, flex_mask, seen_blocks
from ultrascale.kernels.attention.attention_spans import ENDS_MULTIPLE, PackedIds, Spans, ends_of, packed_ids
from ultrascale.kernels.choice.device_kind import meta_stands_for
from ultrascale.work.work import Shape, block_work, shared_work

CPU = torch.device("cpu")
IDS = torch.tensor([[0] * 4 + [1] * 7 + [2] * 2, [0] * 1 + [1] * 12, [0] * 13])


def inputs(groups: int, value_dim: int, *, sinks: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    drawn = [random(3, 13, 4, 8), random(3, 13, groups, 8), random(3, 13, groups, value_dim)]
    return [*drawn, random(4)] if sinks else drawn


def written_out(given: list[Tensor], ids: Tensor | None, window: int | None) -> Tensor:
    query, key, value, *sinks = given
    key, value = (tensor.repeat_interleave(4 // tensor.shape[2], dim=2) for tensor in (key, value))
    place = torch.arange(13)
    distance = place[:, None] - place
    seen = (distance >= 0) & (distance < (window or 13))
    seen = seen.expand(3, 13, 13) if ids is None else seen & (ids[:, :, None] == ids[:, None, :])
    scores = torch.einsum("bshe,bthe->bhst", query, key) * 0.4
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    if sinks:
        scores = torch.cat((scores, sinks[0][:, None, None].expand(3, -1, 13, 1)), dim=-1)
    return torch.einsum("bhst,bthe->bshe", scores.softmax(-1)[..., :13], value)


@pytest.mark.parametrize("core", ["varlen", "flex"])
@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize(("groups", "value_dim", "sinks"), [(4, 8, False), (2, 8, True), (1, 5, True)])
def test_attention_without_a_mask_equals_the_softmax_written_out(core, window, documents, groups, value_dim, sinks):
    given, ids = inputs(groups, value_dim, sinks=sinks), IDS if documents else None
    if core == "flex":
        given = [tensor.detach() for tensor in given]  # torch has no backward pass of it on the CPU; tests/gpu has that
    mask = attention_mask(13, 13, document_ids=ids, window=window, dtype=torch.float64, device=CPU, core=core)
    if core == "varlen" and not documents and window != 3:
        assert mask is None
    else:
        assert isinstance(mask, Spans if core == "varlen" else FlexMask)
    query, key, value, *rest = given
    found = attention(query, key, value, mask, sinks=rest[0] if rest else None, scale=0.4)
    expected = written_out(given, ids, window)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    if core == "flex":
        return
    grad = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(expected, given, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_ends_are_told_once_for_all_sequences_and_padded_with_empty_documents():
    ends = ends_of(IDS)
    assert ends.dtype == torch.int32 and len(ends) == ENDS_MULTIPLE + 1
    assert ends[:7].tolist() == [0, 4, 11, 13, 14, 26, 39] and set(ends[6:].tolist()) == {39}
    many = torch.arange(200)[None]
    assert len(ends_of(many)) == 4 * ENDS_MULTIPLE + 1 and ends_of(many)[200:].unique().tolist() == [200]


def test_the_host_tells_a_gpu_where_documents_end_and_the_cpu_gets_ids_alone():
    assert isinstance(packed_ids(IDS, CPU), Tensor)
    with meta_stands_for("cuda"):
        given = packed_ids(IDS, torch.device("meta"))
        assert isinstance(given, PackedIds) and given.ends.device.type == "meta"
        mask = attention_mask(13, 13, document_ids=given, window=5, dtype=torch.bfloat16, device=given.ids.device)
        assert mask == Spans(given.ends, 5)
        wide = attention_mask(13, 13, document_ids=given, window=5, dtype=torch.float32, device=given.ids.device)
        assert isinstance(wide, Tensor) and wide.shape == (3, 1, 13, 13)


@pytest.mark.parametrize("window", [None, 1, 5, 9, 40])
def test_blocks_that_are_seen_are_those_with_a_pair_that_is_and_whole_ones_those_with_no_other(window):
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(4, 37, generator=generator) < 0.15).cumsum(1)
    place = torch.arange(40)
    distance = place[:, None] - place
    padded = torch.cat((ids, -1 * torch.ones(4, 3, dtype=torch.int64)), 1)
    seen = (distance >= 0) & (distance < (window or 40)) & (padded[:, :, None] == padded[:, None, :])
    exists = (place < 37)[:, None] & (place < 37)
    tiles = (seen & exists).unflatten(1, (10, 4)).unflatten(3, (10, 4)).transpose(2, 3)
    others = (~seen & exists).unflatten(1, (10, 4)).unflatten(3, (10, 4)).transpose(2, 3)
    some, whole = seen_blocks(ids, window, block=4)
    # What is listed may be more than what is seen (ids that a block passes over), never less; whole blocks are exact.
    assert not (tiles.any(-1).any(-1) & ~some).any()
    assert not (whole & others.any(-1).any(-1)).any()
    assert some.sum() <= 1.3 * tiles.any(-1).any(-1).sum()


def test_a_long_window_of_blocks_is_listed_without_a_square_of_tokens():
    ids = torch.zeros(1, 2**17, dtype=torch.int32)  # a square of booleans would be 16 GiB
    mask = flex_mask(2**17, document_ids=ids, window=2**13, device=CPU).blocks
    assert mask.sparsity() > 90


def test_only_what_attention_without_documents_saves_is_saved():
    query, key, value = (torch.randn(3, 13, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    mask = attention_mask(13, 13, document_ids=IDS, window=None, dtype=torch.float32, device=CPU, core="varlen")
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel() * t.itemsize) or t, lambda t: t):
        attention(query, key, value, mask)
    rows = 3 * 13
    assert sorted(saved) == sorted(
        [rows * 4 * 8 * 4, rows * 2 * 8 * 4, rows * 2 * 8 * 4, rows * 4 * 8 * 4, rows * 4 * 4, (ENDS_MULTIPLE + 1) * 4]
    )


def test_the_planner_knows_that_no_mask_exists_and_no_head_is_repeated():
    model = replace(preset("llama-3.2-1b"), num_hidden_layers=2)
    shape = Shape(2, 4096, "bf16", documents=True, device="cuda")
    assert [op.name for op in shared_work(model, shape)] == ["angles"]
    assert not [op for op in block_work(model, 0, shape) if "repeat" in op.name or "mask" in op.saves]
    masked = replace(shape, kernels=replace(shape.kernels, spans=False))
    made = {one.name: one.num_bytes for op in shared_work(model, masked) for one in op.makes}
    assert made["mask"] == 2 * 4096 * 4096 * 2
    under_cp = replace(shape, cp=2)
    assert "mask" in {one.name for op in shared_work(model, under_cp) for one in op.makes}
