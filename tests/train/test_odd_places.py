"""Clock, locale, umask, home and paths as they are somewhere: a run passes all the same."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from train.small_runs import STEPS, curve, make_corpus, rows, small_run, train_here

from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout

PATHS = {
    "spaces": "a folder  with spaces", "unicode": "Größe ☃ 数据", "quote": "it's a \"folder\"", "dollar": "$HOME;`x`&&",
    "newline": "two\nlines", "dashes": "--processes", "percent": "%s{0}", "long": "x" * 200,
}  # fmt: skip


@pytest.mark.catalogue(62)
@pytest.mark.parametrize("name", PATHS.values(), ids=PATHS)
def test_a_run_lives_in_a_folder_of_any_name(home, tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    make_corpus(place / "tokens")
    run = replace(small_run(place), steps=2)
    assert train_here(run).steps_done == 2
    assert train_here(replace(run, steps=3)).steps_done == 3
    assert [step for (step,) in rows(run, "step")] == [1, 2, 3]


@pytest.mark.catalogue(62)
def test_a_clock_that_jumps_back_and_forth_changes_no_step(home, monkeypatch):
    calm, odd = small_run(home, name="calm"), small_run(home, name="odd")
    train_here(calm)
    jumps, real = iter([10**6, -(10**9), 3600] * 10_000), time.time
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + next(jumps)))
    train_here(replace(odd, checkpoint=replace(odd.checkpoint, every_steps=3, keep=1)))
    assert curve(odd) == curve(calm) and len(curve(odd)) == STEPS


ODD = {
    "C locale": {"LC_ALL": "C", "LANG": "C"},
    "no home": {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"},
    "far zone": {"TZ": "Pacific/Kiritimati"},
}


@pytest.mark.nightly
@pytest.mark.catalogue(62)
@pytest.mark.parametrize("environment", ODD.values(), ids=ODD)
def test_two_processes_train_in_an_odd_environment(home, tmp_path, environment):
    place = tmp_path / "größe"
    place.mkdir()
    make_corpus(place / "tokens")
    run = small_run(place, layout=Layout(dp=2, micro_batch_size=1))
    (tmp_path / "run.toml").write_text(to_toml(run), encoding="utf-8")
    words = [sys.executable, "-m", "ultrascale", "train", str(tmp_path / "run.toml"), "--processes", "2", "--json"]
    variables = {key: value for key, value in os.environ.items() if key not in ("LC_ALL", "LANG")}
    done = subprocess.run(words, capture_output=True, env=variables | environment, timeout=200, umask=0o077)
    assert done.returncode == 0, done.stderr.decode()
    assert len(curve(run)) == STEPS
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (place / "small").rglob("*")}
    assert modes == {0}, "umask 077 was not kept"


@pytest.mark.nightly
@pytest.mark.catalogue(62)
def test_a_locale_that_cannot_say_a_path_is_told_with_its_remedy(tmp_path):
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = small_run(tmp_path / "größe")
    (tmp_path / "größe").mkdir()
    make_corpus(tmp_path / "größe" / "tokens")
    (tmp_path / "run.toml").write_text(to_toml(run), encoding="utf-8")
    words = [sys.executable, "-m", "ultrascale", "train", str(tmp_path / "run.toml")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=200)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "LC_ALL=C.UTF-8" in done.stderr
