"""The lock file has every direct dependency, in a version that pyproject.toml allows, with a hash, and names no index."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from tidy.sources import ROOT

LINE = re.compile(r"([a-z0-9-]+)==([^ ]+) --hash=sha256:[0-9a-f]{64}")


def locked() -> dict[str, str]:
    lines = (ROOT / "locks" / "py311.txt").read_text().splitlines()[1:]
    found = [LINE.fullmatch(line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    return {match[1]: match[2] for match in found if match}


def test_every_dependency_is_locked_to_a_version_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(one for name in ("train", "data", "plot", "store", "test", "lint") for one in extras[name]),
    ]
    versions = locked()
    wrong = []
    for text in asked:
        one = Requirement(text)
        if one.name != "ultrascale" and not one.specifier.contains(versions.get(one.name, "0.dev0"), prereleases=True):
            wrong.append(f"{text}: locked {versions.get(one.name)}")
    assert wrong == [], "run .ci/write_lock.py"


def test_the_lock_names_no_index_and_no_path():
    text = (ROOT / "locks" / "py311.txt").read_text()
    assert not re.search(r"https?:|file:|index-url|find-links|@", text)
