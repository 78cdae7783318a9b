"""`plan --png DIR`: a chart each, and clear words where there is nothing to draw or nowhere to write."""

from __future__ import annotations

import sys

import pytest

from ultrascale.cli.main import main

ASKED = ["plan", "--model", "gpt2", "--seq-len", "1024", "--gpus", "8xh100", "--tokens-per-batch", "64k"]


def test_every_chart_of_a_plan_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "charts"
    assert main([*ASKED, "--pp", "2", "--micro-batch-size", "1", "--explain", "--png", str(folder)]) == 0
    names = ["front", "memory", "ranks", "roofline", "scaling", "schedule", "sent", "time"]
    assert sorted(path.stem for path in folder.glob("*.png")) == names
    for path in folder.glob("*.png"):
        assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
    assert main([*ASKED, "--pp", "2", "--micro-batch-size", "1", "--png", str(folder)]) == 0  # pictures are drawn again


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*ASKED, "--png", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err


def test_without_matplotlib_what_to_install_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*ASKED, "--png", str(tmp_path / "charts")]) == 1
    assert "ultrascale[plot]" in capsys.readouterr().err
    assert not (tmp_path / "charts").exists()


def test_where_no_times_are_known_nothing_is_drawn(tmp_path, capsys):
    assert main(["plan", "--model", "gpt2", "--gpus", "2xcpu", "--png", str(tmp_path / "charts")]) == 2
    assert "--png" in capsys.readouterr().err
