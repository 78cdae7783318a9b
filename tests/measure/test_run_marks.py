"""What happened to a run, on its curves."""

from __future__ import annotations

import json

import pytest

from ultrascale.demo.picture import loss_curve
from ultrascale.measure.plots import plot_loss, smoothed
from ultrascale.measure.run_marks import Mark, marks_of

EVENTS = [
    {"event": "start", "step": 0, "world": 2, "time": 0.0},
    {"event": "failure", "step": 46, "time": 1.0},
    {"event": "start", "step": 40, "world": 2, "time": 2.0},
    {"event": "stop", "step": 80, "time": 3.0},
    {"event": "start", "step": 80, "world": 4, "time": 4.0},
]


def test_a_kill_a_resume_and_a_change_of_ranks_are_marked_at_their_steps(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVENTS))
    told = [Mark(40, "resumed"), Mark(46, "killed"), Mark(80, "stopped, resumed on 4 ranks (was 2)")]
    assert marks_of(tmp_path) == told


def test_a_run_without_events_has_no_marks(tmp_path):
    assert marks_of(tmp_path) == []


def test_marks_and_the_smoothed_loss_are_drawn(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr("ultrascale.measure.plots.save_figure", lambda figure, path: drawn.setdefault("axes", figure.axes[0]))
    rows = [{"step": step, "train/loss": 5.0 - step % 2} for step in range(100)]
    plot_loss(rows, tmp_path / "loss.png", marks=[Mark(46, "killed"), Mark(400, "after the end")])
    axes = drawn["axes"]
    assert [text.get_text() for text in axes.texts] == ["killed"]
    raw, smooth = (line.get_ydata() for line in axes.lines[:2])
    assert max(raw) - min(raw) == 1.0 and max(smooth[2:-2]) - min(smooth[2:-2]) < 0.3


def test_smoothing_keeps_the_mean_of_a_line():
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx([1.5, 2.0, 3.0, 4.0, 4.5])


def test_the_curve_in_letters_falls_and_names_the_step_of_the_kill():
    lines = loss_curve([8.0 - step / 10 for step in range(60)], width=40, marks=[(30, "killed")]).split("\n")
    assert lines[0].startswith("  7.95") or lines[0].startswith("  8.0") or lines[0].startswith("  7.9")
    assert lines[0].rstrip().endswith("█") is False or len(lines[0]) < len(lines[8])
    assert len(lines[8]) == 7 + 40 and lines[-1].strip() == "^ step 30: killed"
