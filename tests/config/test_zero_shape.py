"""What ZeRO cuts of stacked experts, and which boxes of them a rank's rows are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.work.sharding.owners import chunk
from ultrascale.work.sharding.places import row_boxes, zero_shape


@pytest.mark.parametrize(
    ("shape", "ranks", "cut"),
    [
        ((8, 6, 5), 8, (8, 6, 5)),
        ((8, 6, 5), 4, (8, 6, 5)),
        ((8, 6, 5), 3, (48, 5)),
        ((8, 6, 5), 64, (48, 5)),
        ((1, 6, 5), 2, (6, 5)),
        ((6, 5), 4, (6, 5)),
        ((7,), 2, (7,)),
    ],
)
def test_experts_that_ranks_do_not_divide_are_cut_by_rows_and_all_else_as_it_is(shape, ranks, cut):
    assert zero_shape(shape, ranks) == cut


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.integers(1, 40))
def test_the_boxes_of_all_ranks_are_the_whole_weight_and_few(experts: int, rows: int, columns: int, ranks: int) -> None:
    shape = (experts, rows, columns)
    whole = np.arange(experts * rows * columns).reshape(shape)
    cut = whole.reshape(zero_shape(shape, ranks))
    for rank in range(ranks):
        span = chunk(len(cut), ranks, rank)
        own, found = cut[span.first : span.first + span.length], list(row_boxes(shape, cut.shape, span.first, span.length))
        assert 1 <= len(found) <= 3
        assert [entries.start for entries, _ in found] == [0, *(entries.stop for entries, _ in found[:-1])]
        assert found[-1][0].stop == len(own)
        for entries, box in found:
            there = tuple(slice(first, first + size) for first, size in zip(box.offsets, box.shape, strict=True))
            assert (own[entries].reshape(box.shape) == whole[there]).all()


def test_rows_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\[12, 2\] is not how \[3, 5, 2\] is cut"):
        list(row_boxes((3, 5, 2), (12, 2), 0, 4))
