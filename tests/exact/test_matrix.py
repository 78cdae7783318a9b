"""The combinations of `ultrascale check --matrix`: a part of them here; `--matrix` proves all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ultrascale.check import matrix
from ultrascale.check.compare import Difference, Verdict
from ultrascale.check.matrix import Cell, CellOutcome, cells, prove_cells
from ultrascale.check.small import MOST_PROCESSES
from ultrascale.check.support import command, to_markdown

DOCS = Path(__file__).parents[2] / "docs"
WHOLE = ("Axes, two by two", "Odd numbers")


def chosen() -> list[Cell]:
    """All pairs of axes. Of each other table a combination for every row and every column, of at most four processes; two of
    eight."""
    found = [cell for cell in cells() if cell.table in WHOLE]
    rest = [cell for cell in cells() if cell.table not in WHOLE and cell.run.layout.world_size <= 4]
    seen: set[tuple[str, str]] = set()
    for least_new in (2, 1):  # those that are the first of their row and of their column do most
        for cell in rest:
            new = {(cell.table, f"row {cell.row}"), (cell.table, f"column {cell.column}")} - seen
            if len(new) >= least_new:
                found.append(cell)
                seen |= new
    return found + [cell for cell in cells() if cell.run.layout.world_size == 8][:2]


def test_the_part_has_every_row_and_every_column_that_four_processes_can_prove():
    def places(part: list[Cell]) -> set[tuple[str, str, str]]:
        named = [("row", cell.table, cell.row) for cell in part] + [("column", cell.table, cell.column) for cell in part]
        return set(named)

    assert places(chosen()) >= places([cell for cell in cells() if cell.run.layout.world_size <= 4])


@pytest.mark.timeout(900)
def test_a_part_of_the_matrix_is_exact():
    outcomes = prove_cells(chosen(), processes=8)
    wrong = {one.cell.name: one.verdict for one in outcomes if one.state == "DIFFERS"}
    assert wrong == {}
    assert Counter(one.state for one in outcomes)["proven"] > 100


def test_every_pair_of_axes_is_there_and_nothing_is_refused():
    found = cells()
    assert len({cell.name for cell in found}) == len(found) > 300
    assert [cell.name for cell in found if cell.refused] == []
    pairs = {frozenset((cell.row, cell.column)) for cell in found if cell.table == "Axes, two by two"}
    axes = ("dp", "ZeRO 3", "tp", "cp", "pp", "ep", "expert_tp")
    assert {frozenset((one, other)) for one in axes for other in axes if {one, other} != {"dp", "ZeRO 3"}} <= pairs
    schedules = {(cell.row, cell.column) for cell in found if cell.table == "Schedules"}
    names = ("1f1b", "afab", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe", "dualpipe-v")
    assert {(name, f"ZeRO {stage}") for name in names for stage in range(4)} <= schedules


def test_a_combination_that_needs_more_processes_is_untried_and_one_that_differs_stops_no_other(monkeypatch):
    few = [cell for cell in cells() if cell.table == "Odd numbers"]
    few.append(replace(few[0], row="refused", refused="layout.pp is odd"))

    def judged(cases, **options):
        bad = Difference(0, "gradient", "a", 1.0)
        return [Verdict(c.name, 1e-11, {}, (bad,) if c.run.layout.pp > 1 else ()) for c in cases]

    monkeypatch.setattr(matrix, "prove_all", judged)
    states = Counter(one.state for one in prove_cells(few, processes=3))
    assert states["untried"] and states["DIFFERS"] and states["proven"] and states["refused"]


def test_the_page_says_what_each_combination_is_and_why_some_are_refused():
    cell = replace(cells()[0], table="T", row="a", column="x")
    good, bad = Verdict("c", 1e-11, {}, ()), Verdict("c", 1e-11, {}, (), failure="rank 1 died")
    page = to_markdown(
        [
            CellOutcome(cell, good),
            CellOutcome(replace(cell, column="y"), bad),
            CellOutcome(replace(cell, row="b", refused="layout.pp is odd"), None),
            CellOutcome(replace(cell, row="b", column="y"), None),
        ],
        2,
        6,
    )
    assert f"Written by `{command(2, 6)}`; do not edit. 4" in page
    assert "4 combinations: 1 proven, 1 refused, 1 untried, 1 DIFFERS." in page
    assert "| a | proven | **DIFFERS** |\n| b | refused (1) | untried |" in page
    assert "1. refused: layout.pp is odd" in page


def test_the_committed_page_is_of_the_command_that_the_documentation_gives_and_of_the_programs_own_reasons():
    page, proving = ((DOCS / name).read_text() for name in ("support.md", "proving.md"))
    written = command(5, MOST_PROCESSES)
    assert f"Written by `{written}`" in page and "5 steps, documents" in page and f"\n{written}\n" in proving
    found = cells()
    reasons = {cell.refused for cell in found if cell.refused}
    assert f" {len(found)} combinations: " in page
    assert {line.partition(". refused: ")[2] for line in page.splitlines() if ". refused: " in line} == reasons
