"""`plan --png DIR`: a chart each, and clear words where there is nothing to draw or nowhere to write."""

from __future__ import annotations

import sys
from itertools import combinations

import pytest

from ultrascale.cli.main import main
from ultrascale.page.pictures import _roofline

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


def test_no_two_names_of_the_roofline_overlap_or_are_the_same():
    """Of Llama 3 8B `q_proj, o_proj` was written into `gate_proj, up_proj, down_proj`; an expert's products have other names
    than the shared expert's."""
    pytest.importorskip("matplotlib")
    known = {"kind": "matrix products", "seconds": 1.0}
    spots = [("k_proj", 680, 568e12), ("q_proj", 1365, 617e12), ("o_proj", 1365, 617e12), ("core", 1640, 240e12)]
    spots += [(f"mlp.{name}_proj", 1790, 618e12) for name in ("gate", "up", "down")] + [("experts.up_proj", 2020, 610e12)]
    rows = [known | {"name": f"layer.{name}", "intensity": x, "rate": y} for name, x, y in spots]
    roofline = {
        "device": "a GPU",
        "rows": rows,
        "peak": {"value": 989e12, "text": ""},
        "bandwidth": {"value": 3e12, "text": ""},
    }
    figure = _roofline({"title": {"model": "", "machine": "", "layout": ""}}, roofline)
    figure.draw_without_rendering()
    names = figure.axes[0].texts
    of_mlp, of_experts = "gate_proj, mlp.up_proj, down_proj", "experts.up_proj"
    assert [name.get_text() for name in names] == ["k_proj", "q_proj, o_proj", "core", of_mlp, of_experts]
    boxes = [name.get_window_extent() for name in names]
    assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
