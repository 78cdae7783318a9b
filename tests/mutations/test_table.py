"""The table of planted bugs is true of the source as it is, and nobody missed one. At night all of them are planted again."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mutations.table import PAGE, SOURCE, TESTS, Mutation, controls, page, problems, read_mutations, read_results, write_results

MUTATIONS = read_mutations()


def test_every_planted_text_occurs_once_in_its_file_and_leaves_python():
    for one in MUTATIONS:
        source = (SOURCE / one.file).read_text()
        assert one.planted(source) != source, one.name


def test_every_name_in_a_planted_bug_is_one_of_the_source():
    """Anything would see a bug that names what is not there."""
    known = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"[A-Za-z_]\w*", path.read_text())}
    bugs = {one.name: re.sub(r"\"[^\"]*\"|'[^']*'", "", one.new) for one in MUTATIONS}
    assert {name: gone for name, new in bugs.items() if (gone := set(re.findall(r"\b[A-Za-z_]\w*", new)) - known)} == {}


def test_every_test_that_is_to_see_a_bug_exists():
    named = {test.partition("[")[0] for one in MUTATIONS for test in one.tests}
    functions = {
        file: {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        for file in {test.partition("::")[0] for test in named}
    }
    assert [test for test in sorted(named) if test.partition("::")[2] not in functions[test.partition("::")[0]]] == []


def test_every_bug_was_planted_as_it_is_told_and_was_seen_by_all_that_should():
    assert problems(MUTATIONS, read_results()) == []


def test_the_table_in_the_documentation_is_current():
    assert PAGE.read_text() == page(MUTATIONS, read_results()), "run `python tests/mutations/table.py`"


def test_no_bug_is_told_twice():
    texts = Counter((one.file, one.old, one.new) for one in MUTATIONS)
    assert [text for text, count in texts.items() if count > 1] == []
    assert sum(not one.same for one in MUTATIONS) >= 132


def test_what_nobody_sees_or_somebody_sees_although_it_changes_nothing_is_a_problem():
    seen = Mutation("seen", "train/loop.py", "a bug", "old", "new", check="llama-3-8b dp=2", tests=("a.py::test_b",))
    same = Mutation("same", "train/loop.py", "none", "old", "other", check="llama-3-8b dp=2", same="for a reason")
    told = {"digest": seen.digest, "check": "step 0: loss differs", "tests": "a.py::test_b"}
    assert problems([seen], {"seen": told}) == [] == problems([same], {"same": {"digest": same.digest, "check": ""}})
    assert problems([seen], {"seen": told | {"check": ""}}) == ["seen: check did not see it"]
    nameless = "raised NameError: name 'found' is not defined"
    assert problems([seen], {"seen": told | {"check": nameless}}) == [f"seen: names what is not there: {nameless}"]
    assert problems([seen], {"seen": told | {"digest": same.digest}}) == ["seen: run `python tests/mutations/run.py seen`"]
    assert problems([same], {"same": {"digest": same.digest, "check": "loss"}}) == ["same: check saw a change: loss"]


def test_a_text_that_is_not_there_once_is_refused():
    bug = Mutation("twice", "train/loop.py", "a bug", "a", "b")
    with pytest.raises(ValueError, match=r"occurs 2 times in train/loop\.py, expected once"):
        bug.planted("a a")


def planted_again(into: Path, *words: str) -> dict[str, dict[str, Any]]:
    """By a process of its own, which has loaded none of the source. Without words: all of them."""
    subprocess.run([sys.executable, str(Path(__file__).parent / "run.py"), "--into", str(into), *words], check=False)
    return json.loads(into.read_text())


def test_a_bug_is_planted_in_a_copy_and_seen_by_proof_and_test_and_what_changes_nothing_by_neither(tmp_path):
    found = planted_again(tmp_path / "rows.json", "adam-eps", "adam-count-after-resume", "rope-llama3-boundary")
    assert found["adam-eps"]["check"].startswith("step 0: weight of ") and found["adam-eps"]["tests"] == ""
    assert found["adam-count-after-resume"]["tests"] == "train/test_resume.py::test_the_count_of_updates_is_restored"
    assert found["rope-llama3-boundary"]["tests"] == ""


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3600)
def test_every_bug_is_seen_when_it_is_planted_again(tmp_path, request):
    found = planted_again(tmp_path / "rows.json")
    control = planted_again(
        tmp_path / "control.json", "--control"
    )  # else what fails for another reason would be taken for seen
    assert problems(controls(MUTATIONS), control) == []
    if request.config.getoption("--record-catalogue"):
        write_results(found)
        PAGE.write_text(page(MUTATIONS, read_results()))
    assert problems(MUTATIONS, found) == []
