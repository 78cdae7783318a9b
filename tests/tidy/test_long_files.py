"""Files that workers begin with are files."""

from __future__ import annotations

from tidy.sources import ROOT

TESTS = ROOT / "tests"


def test_every_long_file_exists_and_stands_once():
    lines = [line for line in (TESTS / "long_files.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines and [line for line in lines if not (TESTS / line).is_file()] == []
    assert len(lines) == len(set(lines))
