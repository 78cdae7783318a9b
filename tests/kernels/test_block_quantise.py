from __future__ import annotations

import pytest
import torch

from ultrascale.kernels.optimizers.block_quantise import (
    BLOCK,
    NOISE_BITS,
    dequantise,
    noise,
    num_blocks,
    positions,
    quantise,
    round_to_bf16,
    rounding_key,
    table,
)
from ultrascale.train.optimizers.muon import orthogonalise


def rows(shape, offsets=None, whole=None):
    return positions(shape, offsets or (0,) * len(shape), whole or shape, torch.device("cpu"))


def test_positions_of_a_box_are_those_of_the_whole():
    whole = torch.arange(4 * 6 * 10).view(4, 6, 10)
    found = rows((2, 3, 4), (1, 2, 5), (4, 6, 10))
    assert torch.equal(found, whole[1:3, 2:5, 5].flatten())


def test_noise_is_uniform_and_a_function_of_key_and_place():
    whole = noise(rows((64, 1000)), 1000, rounding_key(1, 2, "w", "m"))
    part = noise(rows((16, 300), (32, 500), (64, 1000)), 300, rounding_key(1, 2, "w", "m"))
    assert torch.equal(whole[32:48, 500:800], part)
    share = whole.double() / 2**NOISE_BITS
    assert share.min() >= 0 and share.max() < 1
    assert share.mean().item() == pytest.approx(0.5, abs=0.005) and share.var().item() == pytest.approx(1 / 12, rel=0.02)
    assert abs(torch.corrcoef(torch.stack((share[:, :-1].flatten(), share[:, 1:].flatten())))[0, 1]) < 0.02
    far = noise(torch.tensor([0, 2**32]), 1000, 7)  # elements of a very large weight
    assert not torch.equal(*far)
    other = noise(rows((64, 1000)), 1000, rounding_key(1, 3, "w", "m"))
    assert abs(torch.corrcoef(torch.stack((share.flatten(), other.double().flatten())))[0, 1]) < 0.02


def test_bf16_is_one_of_the_two_neighbours_and_right_on_average():
    values = torch.full((1, 20000), 1.0) + 0.25 * 2**-7
    found = round_to_bf16(values, noise(rows((1, 20000)), 20000, 7)).float()
    assert set(found.unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert (found > 1).double().mean().item() == pytest.approx(0.25, abs=0.015)
    exact = torch.randn(1, 100).bfloat16()
    assert torch.equal(round_to_bf16(exact.float(), noise(rows((1, 100)), 100, 1)), exact)


def test_tables_ascend_and_hold_zero_and_one():
    signed, unsigned = table(signed=True), table(signed=False)
    assert (len(signed), len(unsigned)) == (255, 256)
    assert bool((signed.diff() > 0).all()) and bool((unsigned.diff() > 0).all())
    assert torch.equal(signed, -signed.flip(0)) and signed[127] == 0 and unsigned[0] == 0 and signed[-1] == unsigned[-1] == 1


@pytest.mark.parametrize("signed", [True, False])
def test_eight_bits_are_unbiased_within_two_percent_and_keep_what_is_small(signed):
    values = torch.randn(40, 700) * 10.0 ** torch.randint(-4, 1, (40, 1))
    values = values if signed else values.abs()
    sums = torch.zeros_like(values)
    for key in range(60):
        codes, scales = quantise(values, signed=signed, random=noise(rows((40, 700)), 700, key))
        sums += dequantise(codes, scales, signed=signed)
    assert scales.shape == (40, num_blocks(700)) and codes.dtype == torch.uint8
    assert ((sums / 60 - values).abs() / scales.repeat_interleave(BLOCK, 1)[:, :700]).max() < 0.012
    once = dequantise(*quantise(values, signed=signed), signed=signed)
    assert ((once - values).norm() / values.norm()) < 0.02


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_read_is_kept_again_exactly(signed):
    values = torch.randn(10, 300) if signed else torch.rand(10, 300) * 1e-6
    codes, scales = quantise(values, signed=signed, random=noise(rows((10, 300)), 300, 3))
    again, same_scales = quantise(dequantise(codes, scales, signed=signed), signed=signed)
    assert torch.equal(again, codes) and torch.equal(same_scales, scales)


def test_what_is_divided_by_never_becomes_zero_and_zero_stays():
    values = torch.tensor([[1.0, 1e-12, 0.0]])
    codes, scales = quantise(values, signed=False, random=torch.full((1, 3), 2**NOISE_BITS - 1))
    read = dequantise(codes, scales, signed=False)[0]
    assert read[1] > 0 and read[2] == 0


def test_columns_of_a_row_have_the_blocks_of_the_whole_row():
    values = torch.randn(5, 600)
    codes, scales = quantise(values, signed=True)
    for first, last in ((0, 256), (256, 600), (100, 300)):
        blocks = slice(first // BLOCK, first // BLOCK + num_blocks(last - first, first))
        part, own = quantise(values[:, first:last], signed=True, first=first, widest=lambda s, b=blocks: scales[:, b])
        assert torch.equal(part, codes[:, first:last]) and torch.equal(own, scales[:, blocks])
    given: list[torch.Tensor] = []
    quantise(values[:, 100:300], signed=True, first=100, widest=lambda own: given.append(own) or own)
    expected = torch.stack([values[:, 100:256].abs().amax(1), values[:, 256:300].abs().amax(1)], 1)
    assert torch.equal(given[0], expected)


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (3, 16, 40)])
def test_iterations_bring_singular_values_near_one_and_keep_the_directions(shape):
    matrix = torch.randn(shape, dtype=torch.float64)
    found = orthogonalise(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.mT @ found @ right.mT
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-10
    assert orthogonalise(matrix.float()).dtype == torch.bfloat16
