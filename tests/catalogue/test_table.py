"""The table of faults says what is tested, and no more."""

from catalogue.table import (
    PAGE,
    Cover,
    Row,
    find_planted,
    find_tests,
    page,
    read_results,
    read_rows,
    read_whole_run,
    without_control,
)

TESTS = find_tests()
COVERS = TESTS + find_planted(TESTS)


def test_the_table_in_the_documentation_is_current():
    told = "run `python tests/catalogue/table.py`"
    assert PAGE.read_text() == page(read_rows(), COVERS, read_results(), read_whole_run()), told


def test_there_are_62_rows_and_every_mark_is_one_of_them():
    assert [row.number for row in read_rows()] == list(range(1, 63))
    assert {number for test in TESTS for number in test.rows} <= set(range(1, 63))


def test_a_row_tells_its_tests_when_they_run_and_what_they_came_to():
    rows = [Row(1, "storage", "a fault", "a promise"), Row(2, "storage", "another", "nothing")]
    control = Cover("a.py::test_control_z", (1,), nightly=False)
    tests = [Cover("a.py::test_x", (1,), nightly=False), Cover("a.py::test_y", (1,), nightly=True), control]
    passed, failed = ({"result": result, "cases": 3, "seconds": 45.0, "on": "2026-01-02"} for result in ("passed", "failed"))
    passed["processor"] = 30.0
    text = page(rows, tests, {"a.py::test_x": passed, control.name: passed})
    told = "`a.py::test_control_z` | CI and nightly | passed, 6 cases, 2026-01-02; 1 not recorded |"
    assert f"| 1 | a fault | a promise | `a.py::test_x`<br>`a.py::test_y` | {told}" in text
    assert "1 of 2 rows have a test, 1 in every run of CI" in text and "| 2 | another | nothing | none |  |  |  |" in text
    assert "1 of the 2 that inject a fault have a control" in text
    assert "CI's 6 cases" in text and "took 1.5 minutes, each when last recorded" in text
    assert "6 of them 1.0 minutes of processor time" in text
    earlier = passed | {"on": "2025-12-31"}
    assert "| passed, 6 cases, 2025-12-31 to 2026-01-02; 1 not" in page(
        rows, tests, {"a.py::test_x": passed, control.name: earlier}
    )
    whole = {"minutes": 7.25, "cases": 9, "workers": 3, "load": 11.6, "on": "2026-01-03"}
    assert "2026-01-03: 7.2 minutes for 9 cases" in page(rows, tests, {}, whole) and "last whole run" not in text
    assert "1 of 2 failed, 2026-01-02" in page(rows, tests, {"a.py::test_x": passed, "a.py::test_y": failed})


def test_every_row_that_injects_a_fault_has_a_control_in_ci():
    rows = read_rows()
    assert without_control(rows, COVERS) == []
    nightly = [Cover(f"a.py::test_control_{row.number}", (row.number,), nightly=row.number == 7) for row in rows]
    assert without_control(rows, nightly) == [7]
    assert without_control(rows, [Cover("a.py::test_x", (1, 55), nightly=False)]) == list(range(1, 55))


def test_a_test_is_found_by_its_mark_or_that_of_its_module(tmp_path):
    text = "@pytest.mark.catalogue(3, 4)\n@pytest.mark.nightly\ndef test_a(): ...\ndef test_b(): ...\n"
    (tmp_path / "test_one.py").write_text(text)
    (tmp_path / "test_two.py").write_text("pytestmark = [pytest.mark.catalogue(5)]\ndef test_c(): ...\n")
    found = [Cover("test_one.py::test_a", (3, 4), nightly=True), Cover("test_two.py::test_c", (5,), nightly=False)]
    assert find_tests(tmp_path) == found


def test_a_planted_bug_is_a_control_of_the_rows_whose_tests_must_see_it(tmp_path):
    tests = [Cover("a.py::test_x", (1, 2), nightly=False), Cover("a.py::test_y", (2, 4), nightly=False)]
    faults = {"one": ["a.py::test_x[2-dp]"], "both": ["a.py::test_x", "a.py::test_y"], "another": ["a.py::test_z"]}
    (tmp_path / "faults.toml").write_text("".join(f"[{name}]\ntests = {seen}\n" for name, seen in faults.items()))
    planted = find_planted(tests, tmp_path / "faults.toml")
    assert [(bug.name.partition("::")[2], bug.rows) for bug in planted] == [("one", (1, 2)), ("both", (1, 2, 4))]
    assert without_control([Row(2, "storage", "", ""), Row(3, "storage", "", "")], tests + planted) == [3]
    text = page([Row(2, "storage", "a fault", "a promise")], tests + planted, {})
    assert "`mutations/faults.toml::one`<br>`mutations/faults.toml::both` | CI | not recorded |" in text
