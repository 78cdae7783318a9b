"""The actions of a step under each ZeRO stage."""

import pytest

from ultrascale.schedules.accumulate import accumulate


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, "F0k B0k F1k B1k F2k B2rs"),
        (1, "F0k B0k F1k B1k F2k B2rs"),
        (2, "F0k B0rk F1k B1rk F2k B2rs"),
        (3, "F0 B0r F1 B1r F2 B2rs"),
    ],
)
def test_each_stage_reduces_and_keeps_what_its_table_says(stage, expected):
    assert " ".join(map(str, accumulate(3, stage))) == expected


def test_one_micro_batch_reduces_at_once():
    assert " ".join(map(str, accumulate(1, 1))) == "F0k B0rs"


@pytest.mark.parametrize(("micro_batches", "stage"), [(0, 0), (1, 4)])
def test_impossible_requests_are_refused(micro_batches, stage):
    with pytest.raises(ValueError, match=r"got"):
        accumulate(micro_batches, stage)
