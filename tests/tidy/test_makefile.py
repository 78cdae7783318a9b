"""`make install` runs in a plain shell, and takes the releases of the lock file unless told otherwise; `make nightly` runs the
tests that draw other examples at night."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tidy.sources import ROOT


@pytest.mark.parametrize(
    ("words", "locked"), [([], True), (["LOCK="], False), (["TORCH=2.12.0"], False)], ids=["locked", "newest", "another torch"]
)
def test_the_recipe_is_sound_and_names_the_locked_releases(words, locked, tmp_path):
    assert ("--constraint" in recipe(tmp_path, "install", *words)) == locked


def test_make_nightly_runs_every_file_that_draws_other_examples_at_night(tmp_path):
    assert "-m 'draws and not nightly'" in recipe(tmp_path, "nightly")
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    more = re.compile(r"^ +(@examples|read_confined)\(|^[A-Z]+ = .*ULTRASCALE_NIGHTLY", re.MULTILINE)
    mark = re.compile(r"^@given|^@pytest\.mark\.draws|^pytestmark = pytest\.mark\.draws", re.MULTILINE)
    draws = {path for path, text in texts.items() if more.search(text)}
    marked = {path for path, text in texts.items() if mark.search(text)}
    assert len(draws) >= 4 and draws <= marked, draws - marked


def recipe(folder: Path, *words: str) -> str:
    """What `make WORDS` would run; a shell can read it."""
    if shutil.which("make") is None:
        pytest.skip("no make here")
    for name in ("Makefile", "pyproject.toml", "locks"):  # without the environment that runs this
        (folder / name).symlink_to(ROOT / name)
    done = subprocess.run(["make", "--dry-run", *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["sh", "-n"], input=done.stdout, text=True).returncode == 0
    return done.stdout
