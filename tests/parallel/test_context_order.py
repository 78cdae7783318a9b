"""Ranks of context parallelism hold every position once, as many each, and do the same work."""

from __future__ import annotations

import random

import pytest

from ultrascale.description.layout import Layout
from ultrascale.work.sharding.context_order import Pieces, local_pieces, num_slots, ring_order, views

PROMISED = 0.02


def positions(pieces: Pieces) -> list[int]:
    return [at for start, stop, _ in pieces for at in range(start, stop)]


def imbalance(order: tuple[Pieces, ...]) -> float:
    """Work of the busiest rank over the mean, less one."""
    work = [sum(piece.work for piece in pieces) for pieces in order]
    return max(work) * len(work) / sum(work) - 1


def skewed_documents(length: int, kind: str, draw: random.Random) -> tuple[int, ...]:
    """Where documents begin; their lengths are anything between alike and one long among many short."""
    lengths = {
        "log-uniform": lambda: int(2 ** draw.uniform(1, 12)),
        "pareto": lambda: int(20 * draw.paretovariate(0.8)),
        "short": lambda: draw.randint(1, 30),
        "two kinds": lambda: draw.choice((8, 16, length * 3 // 4)),
        "alike": lambda: 97,
        "exponential": lambda: 1 + int(draw.expovariate(1 / 300)),
    }[kind]
    starts = [0]
    while (start := starts[-1] + lengths()) < length:
        starts.append(start)
    return tuple(starts)


KINDS = ("log-uniform", "pareto", "short", "two kinds", "alike", "exponential")


def test_one_document_is_zigzagged():
    assert [positions(pieces) for pieces in ring_order(8, 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(pieces) for pieces in ring_order(7, 2)] == [[0, 1, 5, 6], [2, 3, 4]]
    assert [positions(pieces) for pieces in ring_order(9, 3)] == [[0, 1, 8], [2, 3, 7], [4, 5, 6]]


@pytest.mark.parametrize("length", [1024, 1021, 4096])
@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_the_work_of_a_causal_sequence_is_even(length, ring):
    assert imbalance(ring_order(length, ring)) < 0.5 * PROMISED


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_work_of_packed_documents_is_even_whatever_their_lengths(kind, ring):
    draw = random.Random(7)
    for length in (1024, 1999, 4096):
        for _ in range(15):
            assert imbalance(ring_order(length, ring, skewed_documents(length, kind, draw))) < PROMISED


def test_zigzag_over_the_packed_sequence_would_not_do():
    draw = random.Random(7)
    starts = skewed_documents(4096, "two kinds", draw)
    pieces = [sum(1 for at in rank_pieces for _ in range(at - max(s for s in starts if s <= at) + 1))
              for rank_pieces in map(positions, ring_order(4096, 4))]  # fmt: skip
    assert max(pieces) * 4 / sum(pieces) - 1 > 5 * PROMISED


@pytest.mark.parametrize("ring", [1, 2, 3, 5, 8])
def test_every_position_is_held_once_and_ranks_hold_as_many(ring):
    draw = random.Random(ring)
    for length in (8, 97, 600):
        for kind in KINDS:
            starts = skewed_documents(length, kind, draw)
            order = ring_order(length, ring, starts)
            assert sorted(at for pieces in order for at in positions(pieces)) == list(range(length))
            assert [num_slots(pieces) for pieces in order] == [length // ring + (r < length % ring) for r in range(ring)]
            assert all(max(s for s in starts if s <= piece.stop - 1) == piece.document for p in order for piece in p)


def test_a_causal_sequence_is_off_by_less_than_the_work_of_a_token():
    assert [sum(piece.work for piece in pieces) for pieces in ring_order(4, 3)] == [3, 4, 3]
    for ring in (2, 3, 4, 8):
        assert all(imbalance(ring_order(length, ring)) < ring / length for length in range(2 * ring, 400))


def test_documents_that_are_not_cut_come_last():
    order = ring_order(64, 2, (0, 40, 44, 48, 52, 56, 60))
    for pieces in order:
        cut = [piece.document == 0 for piece in pieces]
        assert cut == sorted(cut, reverse=True)
        assert sum(cut) == 2


def test_neighbours_who_swap_heads_hold_runs_of_their_places_slots():
    order = ring_order(22, 2)
    for place in range(2):
        parts = [local_pieces(order, 3, place * 3 + own) for own in range(3)]
        assert [at for part in parts for at in positions(part)] == positions(order[place])
        assert [num_slots(part) for part in parts] == [4, 4, 3]


@pytest.mark.parametrize("window", [None, 1, 3, 9, 40])
@pytest.mark.parametrize("starts", [(0,), (0, 3, 17, 18, 25)])
def test_what_pieces_see_is_the_least_rectangle_around_the_pairs(window, starts):
    for queries in ring_order(31, 3, starts):
        for keys in ring_order(31, 3, starts):
            documents = [max(s for s in starts if s <= at) for at in range(31)]
            pairs = {
                (i, j)
                for i, q in enumerate(positions(queries))
                for j, k in enumerate(positions(keys))
                if k <= q and documents[q] == documents[k] and (window is None or k > q - window)
            }
            covered = set()
            for view in views(queries, keys, window):
                area = {(i, j) for i in range(*view.queries) for j in range(*view.keys)}
                assert not covered & area
                covered |= area
                seen = area & pairs
                assert view.is_full == (seen == area)
                assert view.queries == (min(i for i, _ in seen), max(i for i, _ in seen) + 1)
                assert view.keys == (min(j for _, j in seen), max(j for _, j in seen) + 1)
            assert covered >= pairs


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        (Layout(cp=8, cp_method="ring+all-to-all"), "[2, 4]"),
        (Layout(cp=8, cp_method="ring+all-to-all", cp_heads=8), "[2, 4]"),
        (Layout(cp=3, cp_method="ring+all-to-all", cp_heads=3), '"ring" or "all-to-all"'),
        (Layout(cp=8, cp_method="ring", cp_heads=2), "Leave it out"),
    ],
)
def test_rings_of_ranks_that_swap_heads_must_be_rings_and_must_swap(layout, remedy):
    (problem,) = layout.problems()
    assert problem.key == "layout.cp_heads"
    assert remedy in problem.remedy
    assert Layout(cp=8, cp_method="ring+all-to-all", cp_heads=4).cp_grid == (2, 4)
