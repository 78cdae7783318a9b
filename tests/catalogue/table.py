"""The catalogue of faults as a table, from what tests say about themselves and from the last recorded run.

    python -m pytest -m catalogue --record-catalogue     run the tests of the catalogue and note their results
    python tests/catalogue/table.py                      write docs/faults.md

Tests are found by reading their files, so that this takes a second and needs nothing that they need.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent
PLANTED = "mutations/faults.toml"
PAGE = TESTS.parent / "docs" / "faults.md"
RESULTS = HERE / "results.json"
WHOLE = HERE / "whole_run.json"
"""Of the last recorded run of all that runs in CI: its wall time."""
TITLES = {
    "processes": "Processes and restart", "hangs": "Hangs, stragglers, network", "storage": "Storage",
    "resume": "Resuming and the order of data", "numerics": "Numbers", "input": "Input and configuration",
}  # fmt: skip

HEAD = """# The catalogue of faults

Every fault and bad input that is tested, what a run promises then, and the test that holds it; [reliability](reliability.md)
explains how. Written by `python tests/catalogue/table.py` from the tests' marks and what
`pytest -m catalogue --record-catalogue` noted.

A control removes the guard against a fault, or plants a bug, and requires that the row's test, or what it judges by, sees the
difference. Every row that injects a fault has one; rows of bad input need none. Controls of `mutations/faults.toml` change the
source: [planted bugs](mutations.md) has what saw each, which CI holds to the source as it is; at night all are planted again.
Nightly tests run with `ULTRASCALE_NIGHTLY=1`."""
INJECTED = ("processes", "hangs", "storage", "resume", "numerics")
"""Groups of rows whose faults are injected, each of which must have a control."""


@dataclass(frozen=True)
class Row:
    """A fault and what is promised."""

    number: int
    group: str
    fault: str
    promise: str


@dataclass(frozen=True)
class Cover:
    """A test that covers rows."""

    name: str
    """`checkpoint/test_kill.py::test_...`, from the folder of tests."""
    rows: tuple[int, ...]
    nightly: bool

    @property
    def is_control(self) -> bool:
        """Whether it plants a bug, with which the rows' own checks must fail."""
        return self.is_planted or self.name.partition("::")[2].startswith("test_control_")

    @property
    def is_planted(self) -> bool:
        """Whether it is a bug of the table of planted bugs, which records what saw it."""
        return self.name.startswith(f"{PLANTED}::")


def read_rows() -> list[Row]:
    """The catalogue, in order."""
    groups = tomllib.loads((HERE / "rows.toml").read_text())
    return [Row(int(number), group, *texts) for group, rows in groups.items() for number, texts in rows.items()]


def find_tests(folder: Path = TESTS) -> list[Cover]:
    """Every test in `folder` that is marked with rows of the catalogue, itself or by its module."""
    return [test for path in sorted(folder.rglob("test_*.py")) for test in _tests_of(path, folder)]


def find_planted(tests: list[Cover], faults: Path = TESTS / PLANTED) -> list[Cover]:
    """Planted bugs that some of `tests` must see: each is a control of the rows that these cover."""
    rows_of = {test.name: test.rows for test in tests}
    planted = []
    for name, fault in tomllib.loads(faults.read_text()).items():
        rows = {row for test in fault.get("tests", ()) for row in rows_of.get(test.partition("[")[0], ())}
        if rows:
            planted.append(Cover(f"{PLANTED}::{name}", tuple(sorted(rows)), nightly=False))
    return planted


def read_results() -> dict[str, dict[str, Any]]:
    """What the last recorded run of each test came to."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_results(new: dict[str, dict[str, Any]]) -> None:
    """Note `new` results beside the older ones of tests that are still there. One test a line."""
    known = {test.name for test in find_tests()}
    kept = {name: result for name, result in (read_results() | new).items() if name in known}
    lines = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(kept.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_whole_run() -> dict[str, Any] | None:
    """What is known of the last run of all that runs in CI."""
    return json.loads(WHOLE.read_text()) if WHOLE.exists() else None


def write_whole_run(*, minutes: float, cases: int, workers: int, load: float, on: str) -> None:
    """Note the wall time of a run of all that runs in CI. `load`: processes that wanted to run, on the average."""
    whole = {"minutes": round(minutes, 1), "cases": cases, "workers": workers, "load": round(load, 1), "on": on}
    WHOLE.write_text(json.dumps(whole) + "\n")


def without_control(rows: list[Row], tests: list[Cover]) -> list[int]:
    """Numbers of rows that inject a fault and have no control in every run of CI."""
    controlled = {number for test in tests if test.is_control and not test.nightly for number in test.rows}
    return [row.number for row in rows if row.group in INJECTED and row.number not in controlled]


def page(rows: list[Row], tests: list[Cover], results: dict[str, dict[str, Any]], whole: dict[str, Any] | None = None) -> str:
    """The text of docs/faults.md."""
    lines = [HEAD, "", *_totals(rows, tests, results), *(["", *_whole(whole)] if whole is not None else [])]
    head = ["| # | fault | promised | tests | controls | run | last result |", "|---|---|---|---|---|---|---|"]
    for group, title in TITLES.items():
        lines += ["", f"## {title}", "", *head]
        lines += [_line(row, tests, results) for row in rows if row.group == group]
    return "\n".join(lines) + "\n"


def _totals(rows: list[Row], tests: list[Cover], results: dict[str, dict[str, Any]]) -> list[str]:
    """How many rows are covered, and what that takes."""
    claims = [test for test in tests if not test.is_control]
    covered = [row for row in rows if any(row.number in test.rows for test in claims)]
    in_ci = [row for row in rows if any(row.number in test.rows and not test.nightly for test in claims)]
    injected = [row for row in rows if row.group in INJECTED]
    controlled = len(injected) - len(without_control(rows, tests))
    ran = [results[test.name] for test in tests if not test.nightly and test.name in results]
    seconds, cases = sum(one["seconds"] for one in ran), sum(one["cases"] for one in ran)
    metered = [one for one in ran if "processor" in one]
    processor, num_metered = sum(one["processor"] for one in metered), sum(one["cases"] for one in metered)
    return [
        f"{len(covered)} of {len(rows)} rows have a test, {len(in_ci)} in every run of CI, the others at night;",
        f"{controlled} of the {len(injected)} that inject a fault have a control.",
        f"CI's {cases} cases (`python -m pytest -m catalogue`) took {seconds / 60:.1f} minutes, each when last recorded, on",
        f"two cores that other work shared; {num_metered} of them {processor / 60:.1f} minutes of processor time.",
    ]


def _whole(whole: dict[str, Any]) -> list[str]:
    return [
        f"Their last whole run, {whole['on']}: {whole['minutes']:.1f} minutes for {whole['cases']} cases,",
        f"`-n {whole['workers']}` on two cores, which {whole['load']:.0f} processes wanted in its last quarter of an hour.",
    ]


def _line(row: Row, tests: list[Cover], results: dict[str, dict[str, Any]]) -> str:
    own = [test for test in tests if row.number in test.rows]
    recorded = [test for test in own if not test.is_planted]
    claims = [test for test in own if not test.is_control]
    times = " and ".join(["CI"] * any(not test.nightly for test in claims) + ["nightly"] * any(test.nightly for test in claims))
    cells = [row.number, row.fault, row.promise, _names(claims) or "none", _names([test for test in own if test.is_control])]
    return f"| {' | '.join(map(str, cells))} | {times} | {_last(recorded, results)} |"


def _names(tests: list[Cover]) -> str:
    return "<br>".join(f"`{test.name}`" for test in tests)


def _last(tests: list[Cover], results: dict[str, dict[str, Any]]) -> str:
    known = [results[test.name] for test in tests if test.name in results]
    if not known:
        return "not recorded" if tests else ""
    failed = [one for one in known if one["result"] != "passed"]
    cases = sum(one["cases"] for one in known)
    what = f"{len(failed)} of {len(known)} failed" if failed else f"passed, {cases} case{'s' * (cases > 1)}"
    missing = len(tests) - len(known)
    first, last = min(one["on"] for one in known), max(one["on"] for one in known)
    when = last if first == last else f"{first} to {last}"
    return f"{what}, {when}" + (f"; {missing} not recorded" if missing else "")


def _tests_of(path: Path, folder: Path) -> Iterator[Cover]:
    tree = ast.parse(path.read_text(), filename=str(path))
    shared = [mark for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
              for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])]  # fmt: skip
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [*shared, *node.decorator_list]
            called = [mark for mark in marks if isinstance(mark, ast.Call) and _is(mark, "catalogue")]
            rows = tuple(ast.literal_eval(number) for mark in called for number in mark.args)
            if rows:
                nightly = any(_is(mark, "nightly") for mark in marks)
                yield Cover(f"{path.relative_to(folder)}::{node.name}", rows, nightly)


def _is(mark: Any, name: str) -> bool:
    return ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) == f"pytest.mark.{name}"


if __name__ == "__main__":
    TESTS_OF_ROWS = find_tests()
    PAGE.write_text(page(read_rows(), TESTS_OF_ROWS + find_planted(TESTS_OF_ROWS), read_results(), read_whole_run()))
    print(f"written: {PAGE}")
