"""Runs that strangers collected, and that no fit sees: each with its source, and how close they are predicted.

The bars are what holds today, rounded up: a mend lowers them, nothing raises them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from ultrascale.validation.predict import predict_rows
from ultrascale.validation.rows import MeasuredRow, read_rows
from ultrascale.validation.scores import ValidationReport, score

FILE = Path(__file__).parents[2] / "benchmarks" / "plan" / "collected_runs.csv"
ADDRESS = re.compile(r"https://|\w+/\w+.*(\.md|\.rst|PR|issue|\bappendix)|blog", re.IGNORECASE)
"""A page, a file or thread of a repository, or a named post."""
UNKNOWN_DISPATCHER = {"jupiter-30b-6", "jupiter-30b-8"}
"""Megatron's all-gather dispatcher, which is not priced."""


@cache
def collected() -> list[MeasuredRow]:
    return list(read_rows(FILE))


@cache
def report() -> ValidationReport:
    return score(collected(), predict_rows([row.config for row in collected()]))


def test_every_row_has_its_own_name_and_a_source_that_can_be_looked_up() -> None:
    assert len(collected()) == len({row.identity for row in collected()}) == 327
    counted = [row for row in collected() if row.measured.tier != "C"]
    assert [row.identity for row in counted if not ADDRESS.search(row.config.source)] == []
    assert len({row.config.source_key for row in collected()}) >= 60


def test_all_rows_but_those_listed_are_predicted() -> None:
    assert {identity for identity, _ in report().unrepresentable} == UNKNOWN_DISPATCHER


def test_times_are_as_close_as_ever_and_intervals_hold_what_they_say() -> None:
    pooled, sources = report().time["all"]
    assert pooled.median_absolute < 0.13
    assert sources.median_absolute < 0.135
    assert pooled.covered is not None and pooled.covered > 0.8


def test_what_ran_is_called_fit_and_what_failed_is_not() -> None:
    (verdict,) = (one for one in report().verdicts if one.group == "all rows")
    assert verdict.false_alarms is not None and verdict.false_alarms < 0.05
    assert verdict.failed_but_fits <= 1
