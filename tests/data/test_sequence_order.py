"""The order of sequences: blends and permutations."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.data.loader import BLOCK, Blend, block_quotas, shuffled, source_key

WEIGHTS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=5)


@given(size=st.integers(1, 300), epoch=st.integers(0, 2**40), key=st.integers(0, 2**64 - 1))
@settings(max_examples=150, deadline=None)
def test_an_epoch_visits_every_sequence_once(size, epoch, key):
    counts = np.arange(epoch * size, (epoch + 1) * size)
    assert sorted(shuffled(counts, size=size, key=key).tolist()) == list(range(size))


def test_a_large_epoch_visits_every_sequence_once():
    visited = shuffled(np.arange(1_000_003), size=1_000_003, key=7)
    assert np.array_equal(np.sort(visited), np.arange(1_000_003))


def test_epochs_differ_in_order():
    first, second = shuffled(np.arange(2000), size=1000, key=3).reshape(2, 1000)
    assert (first == second).sum() < 10  # one in expectation


def test_all_orders_of_four_sequences_are_about_equally_common():
    orders = shuffled(np.arange(4 * 24_000), size=4, key=11).reshape(-1, 4)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 70  # chi-square with 23 degrees of freedom: 1 in 10^6


def test_the_order_of_neighbours_tells_nothing():
    visited = shuffled(np.arange(100_000), size=100_000, key=source_key(1, 0))
    assert abs(np.corrcoef(visited[:-1], visited[1:])[0, 1]) < 0.02


@given(size=st.integers(1, 10**6), numbers=st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_a_place_does_not_depend_on_what_is_asked_with_it(size, numbers):
    together = shuffled(np.array(numbers), size=size, key=5)
    alone = [int(shuffled(np.array([number]), size=size, key=5)[0]) for number in numbers]
    assert together.tolist() == alone


def test_seeds_and_sources_have_different_keys():
    assert len({source_key(seed, source) for seed in range(10) for source in range(10)}) == 100


@given(WEIGHTS, st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_every_block_holds_each_source_within_one_sequence_of_its_share(weights, block):
    source, _ = Blend(tuple(weights)).locate(np.arange(block * BLOCK, (block + 1) * BLOCK))
    exact = [Fraction(str(weight)) for weight in weights]
    for place, weight in enumerate(exact):
        assert abs(int((source == place).sum()) - float(weight * BLOCK / sum(exact))) < 1


@given(WEIGHTS)
@settings(max_examples=30, deadline=None)
def test_a_source_counts_its_numbers_without_gaps_over_blocks(weights):
    source, counts = Blend(tuple(weights)).locate(np.arange(2 * BLOCK + 77))
    for place in range(len(weights)):
        mine = counts[source == place]
        assert np.array_equal(mine, np.arange(len(mine)))


def test_every_batch_of_ten_holds_a_seven_two_one_blend():
    source, _ = Blend((0.7, 0.2, 0.1)).locate(np.arange(5 * BLOCK))
    assert {tuple(np.bincount(batch, minlength=3)) for batch in source.reshape(-1, 10)} == {(7, 2, 1)}


def test_largest_remainders_get_the_odd_sequences():
    assert block_quotas((1.0, 1.0, 1.0)) == [3334, 3333, 3333]
    assert block_quotas((1.0, 1.0, 5.0)) == [1429, 1428, 7143]  # sevenths of 10,000: .57, .57 and .86 are left


@pytest.mark.parametrize("weights", [(0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0), (1e-9, 1.0)])
def test_weights_that_cannot_be_kept_are_refused(weights):
    with pytest.raises(ValueError, match="source 0"):
        block_quotas(weights)
