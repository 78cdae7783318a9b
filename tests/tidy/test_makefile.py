"""`make install` runs in a plain shell, and takes the releases of the lock file unless told otherwise."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from tidy.sources import ROOT


@pytest.mark.parametrize(
    ("words", "locked"), [([], True), (["LOCK="], False), (["TORCH=2.12.0"], False)], ids=["locked", "newest", "another torch"]
)
def test_the_recipe_is_sound_and_names_the_locked_releases(words, locked, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("no make here")
    for name in ("Makefile", "pyproject.toml", "locks"):  # without the environment that runs this
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(["make", "--dry-run", "install", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["sh", "-n"], input=done.stdout, text=True).returncode == 0
    assert ("--constraint" in done.stdout) == locked
