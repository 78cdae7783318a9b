"""Stretches of time, cut where the right answer is known, and every moment counted once whatever they are."""

from __future__ import annotations

from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from ultrascale.measure.step.spans import SpanPiece, ThreadTimeline, TimeSpan, innermost, partition, sums


def names(segments):
    return [(segment.start, segment.end, segment.stack[-1].name) for segment in segments]


def test_nested_ranges_are_cut_into_what_is_innermost():
    found = innermost([TimeSpan(0, 10, "step"), TimeSpan(1, 6, "op"), TimeSpan(2, 3, "inner"), TimeSpan(7, 8, "op 2")])
    assert names(found) == [
        (0, 1, "step"), (1, 2, "op"), (2, 3, "inner"), (3, 6, "op"), (6, 7, "step"), (7, 8, "op 2"), (8, 10, "step"),
    ]  # fmt: skip
    assert [one.name for one in found[2].stack] == ["step", "op", "inner"]


def test_ranges_that_end_together_and_ranges_apart_leave_the_gaps_out():
    found = innermost([TimeSpan(0, 4, "a"), TimeSpan(2, 4, "b"), TimeSpan(6, 7, "c")])
    assert names(found) == [(0, 2, "a"), (2, 4, "b"), (6, 7, "c")]


def test_a_range_that_sticks_out_of_the_one_around_it_is_cut():
    assert names(innermost([TimeSpan(0, 4, "a"), TimeSpan(2, 5, "b")])) == [(0, 2, "a"), (2, 4, "b")]


def test_a_range_that_begins_a_moment_too_early_follows_the_one_before():
    assert names(innermost([TimeSpan(0, 4, "a"), TimeSpan(3.9, 8, "b")])) == [(0, 3.9, "a"), (3.9, 8, "b")]


def test_a_timeline_is_looked_up_by_time():
    timeline = ThreadTimeline(innermost([TimeSpan(0, 4, "a"), TimeSpan(1, 2, "b"), TimeSpan(6, 7, "c")]))
    assert [tuple(one.name for one in timeline.at(when)) for when in (0.5, 1.5, 3.0, 5.0, 6.5, 9.0)] == [
        ("a",), ("a", "b"), ("a",), (), ("c",), (),
    ]  # fmt: skip


def test_the_first_layer_that_is_busy_counts_and_the_rest_is_the_rest():
    computing, sending = (
        [SpanPiece(1, 3, "mm"), SpanPiece(2, 4, "add")],
        [SpanPiece(0, 2, "dp"), SpanPiece(3.5, 6, "tp"), SpanPiece(8, 9, "dp")],
    )
    assert partition((0.5, 8.5), [computing, sending], rest="idle") == [
        SpanPiece(0.5, 1, "dp"), SpanPiece(1, 3, "mm"), SpanPiece(3, 4, "add"), SpanPiece(4, 6, "tp"),
        SpanPiece(6, 8, "idle"), SpanPiece(8, 8.5, "dp"),
    ]  # fmt: skip


spans = st.tuples(st.integers(0, 40), st.integers(0, 20), st.sampled_from("abc")).map(
    lambda t: SpanPiece(t[0], t[0] + t[1], t[2])
)


@given(st.lists(st.lists(spans, max_size=6), max_size=3), st.integers(0, 10), st.integers(11, 50))
def test_every_moment_of_a_window_counts_once(layers, first, last):
    pieces = partition((first, last), layers, rest="rest")
    assert [piece.start for piece in pieces] == [first, *(piece.end for piece in pieces[:-1])]
    assert isclose(sum(sums(pieces).values()), last - first)
    for at in range(first, last):  # whole numbers: nothing begins or ends inside a stretch of one
        active = [piece.category for layer in layers for piece in layer if piece.start <= at < piece.end]
        (here,) = (piece.category for piece in pieces if piece.start <= at < piece.end)
        assert here == (active[0] if active else "rest")
