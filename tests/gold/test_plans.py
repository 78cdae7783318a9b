"""Numbers of 500 drawn plans and of eight searches are those of the record; whoever moves one records anew, and says why."""

from __future__ import annotations

import pytest
from gold.plans import COUNT, answers, asked_again, differences, ranking, recorded

FOLDS, BY_DAY = 5, 3
"""Plans of a fold are drawn alike: whatever moves numbers moves some of any hundred."""


@pytest.mark.parametrize(
    "fold", [pytest.param(fold, marks=[] if fold < BY_DAY else pytest.mark.nightly) for fold in range(FOLDS)]
)
def test_time_and_memory_of_drawn_plans_are_as_recorded(fold: int) -> None:
    then = dict([*recorded()["plans"].items()][fold::FOLDS])
    moved = differences(then, answers([asked_again(text) for text in then]))
    assert not moved, f"{len(moved)} numbers moved, by up to {moved[0][0]:.2%}; python tests/gold/plans.py lists them"


@pytest.mark.parametrize("asked", recorded()["searches"])
def test_a_search_lists_the_layouts_of_the_record(asked: str) -> None:
    name, gpus, length, sequences, stack = asked.split(" ")
    assert ranking(name, gpus, int(length), int(sequences), stack) == pytest.approx(recorded()["searches"][asked], rel=1e-5)


def test_the_record_has_all_that_was_asked_and_a_moved_number_is_seen() -> None:
    plans = recorded()["plans"]
    assert len(plans) == COUNT and {one["fits"] for one in plans.values()} == {True, False}
    (asked, old), *_ = plans.items()
    assert differences({asked: old}, {asked: old | {"step": old["step"] * 1.001}})[0][0] == pytest.approx(1e-3, rel=0.02)
