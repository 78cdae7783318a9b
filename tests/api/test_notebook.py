"""The notebook in docs/ runs, and what stands below its cells is what they show."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = ROOT / ".ci" / "run_notebook.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_shows_what_its_cells_show_now(path):
    pytest.importorskip("matplotlib")
    words = [sys.executable, str(RUNNER), "--check", str(path.relative_to(ROOT))]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_an_output_that_is_no_longer_true_is_named(tmp_path):
    cell = {"cell_type": "code", "source": ["print('a 10.0 s')\n", "1 + 1"], "outputs": [], "execution_count": None}
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["Words."]}, cell]}))
    checked = [sys.executable, str(RUNNER), "--check", str(path)]
    assert subprocess.run(checked, capture_output=True).returncode == 1
    assert subprocess.run([sys.executable, str(RUNNER), str(path)], capture_output=True).returncode == 0
    outputs = json.loads(path.read_text())["cells"][1]["outputs"]
    assert [one["output_type"] for one in outputs] == ["stream", "execute_result"]
    assert outputs[0]["text"] == ["a 10.0 s\n"] and outputs[1]["data"]["text/plain"] == ["2"]
    assert subprocess.run(checked, capture_output=True).returncode == 0
    path.write_text(path.read_text().replace("'a 10.0 s'", "'a 20.0 s'"))
    assert subprocess.run(checked, capture_output=True).returncode == 1


def test_a_cell_that_raises_ends_the_run():
    runner = runpy.run_path(str(RUNNER))
    with pytest.raises(ZeroDivisionError):
        runner["outputs_of"]("1 / 0", {}, 1)
