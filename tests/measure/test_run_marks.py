"""What happened to a run, on its curves."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
from train.small_runs import make_corpus, small_run, stop_at, train_ranks

import ultrascale as us
from ultrascale.demo.story import loss_curve
from ultrascale.description.layout import Layout
from ultrascale.measure.plots import plot_loss, plot_tokens_per_second, smoothed
from ultrascale.measure.run_marks import RunMark, marks_of
from ultrascale.run_rows import metric_line

EVENTS = [
    {"event": "start", "step": 0, "world": 2, "time": 0.0},
    {"event": "failure", "step": 46, "time": 1.0},
    {"event": "start", "step": 40, "world": 2, "time": 2.0},
    {"event": "stop", "step": 80, "time": 3.0},
    {"event": "start", "step": 80, "world": 4, "time": 4.0},
]


def test_a_kill_a_resume_and_a_change_of_ranks_are_marked_at_their_steps(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVENTS))
    told = [RunMark(40, "resumed"), RunMark(46, "killed"), RunMark(80, "stopped, resumed on 4 ranks (was 2)")]
    assert marks_of(tmp_path) == told


@pytest.mark.parametrize(
    "layout, told",
    [
        (["tp2", "ZeRO 1", "micro-batch 2"], "resumed as tp2 (was dp2)"),
        (["one rank", "ZeRO 0", "micro-batch 2"], "resumed as one rank, ZeRO 0 (was dp2, ZeRO 1)"),
        (["dp2", "ZeRO 1", "micro-batch 2"], "resumed"),
        (None, "resumed on 1 rank (was 2)"),
    ],
)
def test_a_change_of_layout_is_marked_also_where_the_ranks_are_as_many(tmp_path, layout, told):
    before = {"event": "start", "step": 0, "world": 2, "time": 0.0, "layout": ["dp2", "ZeRO 1", "micro-batch 2"]}
    after = {"event": "start", "step": 7, "world": 1, "time": 1.0} | ({} if layout is None else {"layout": layout})
    (tmp_path / "events.jsonl").write_text(f"{json.dumps(before)}\n{json.dumps(after)}\n")
    assert marks_of(tmp_path) == [RunMark(7, told)]


def test_a_run_that_goes_on_in_another_layout_says_so_in_its_events(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, layout=Layout(dp=2))
    train_ranks(run, before_step=stop_at(5))
    train_ranks(replace(run, layout=Layout(tp=2, micro_batch_size=2)))
    assert marks_of(tmp_path / "small") == [RunMark(5, "stopped, resumed as tp2, micro-batch 2 (was dp2, micro-batch 1)")]


def test_a_run_without_events_has_no_marks(tmp_path):
    assert marks_of(tmp_path) == []


def test_marks_and_the_smoothed_loss_are_drawn(tmp_path, figures):
    rows = [{"step": step, "train/loss": 5.0 - step % 2} for step in range(100)]
    plot_loss(rows, tmp_path / "loss.png", marks=[RunMark(46, "killed"), RunMark(400, "after the end")])
    axes = figures[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["killed"]
    raw, smooth = (line.get_ydata() for line in axes.lines[:2])
    assert max(raw) - min(raw) == 1.0 and max(smooth[2:-2]) - min(smooth[2:-2]) < 0.3


def test_the_loss_on_each_of_several_validation_corpora_is_drawn(tmp_path, figures):
    row = {"train/loss": 5.0, "val/loss": 4.0, "val/loss/code": 3.0, "val/loss/a/b": 3.0, "val/lossy": 1.0}
    plot_loss([{"step": 1, **row}, {"step": 2, **row}], tmp_path / "loss.png", marks=[])
    labels = [line.get_label() for line in figures[0].axes[0].lines[2:]]
    assert labels == ["validation", "validation, a/b", "validation, code"]


def test_a_mark_that_is_longer_than_the_picture_is_high_leaves_the_curve_its_room(tmp_path):
    rows = [{"step": step, "train/loss": 5.0} for step in range(1, 101)]
    long = "resumed as tp2, ZeRO 0, micro-batch 4, recompute full (was dp2, ZeRO 1, micro-batch 1, recompute none)"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, that axes have collapsed
        plot_loss(rows, tmp_path / "loss.png", marks=[RunMark(46, f"stopped, {long}")])


def test_the_speed_is_drawn_faint_and_smoothed_over_that(tmp_path, figures):
    rows = [{"step": step, "perf/tokens_per_s": 100.0 + step % 2} for step in range(1, 101)]
    plot_tokens_per_second(rows, tmp_path / "tokens_per_second.png", marks=[RunMark(46, "killed")])
    axes = figures[0].axes[0]
    raw, smooth, middle = axes.lines[:3]
    assert list(smooth.get_ydata()) == smoothed(list(raw.get_ydata())) and middle.get_label() == "median 100"
    assert [text.get_text() for text in axes.texts] == ["killed"]


def test_a_report_draws_the_loss_as_the_pictures_do(tmp_path):
    """`report().plot()`: marked and smoothed."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVENTS))
    rows = [metric_line(step, {"train/loss": 5.0 - step % 2}) for step in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    axes = us.report(tmp_path).plot().axes[0]
    assert [text.get_text() for text in axes.texts] == ["resumed", "killed", "stopped, resumed on 4 ranks (was 2)"]
    assert list(axes.lines[1].get_ydata()) == smoothed(list(axes.lines[0].get_ydata()))


def test_smoothing_keeps_the_mean_of_a_line():
    assert smoothed([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx([1.5, 2.0, 3.0, 4.0, 4.5])


def test_smoothing_leaves_out_values_that_are_not_finite():
    nan, inf = float("nan"), float("inf")
    assert smoothed([1.0, inf, 3.0, nan, inf, nan]) == pytest.approx([1.0, 2.0, 3.0, 3.0, nan, nan], nan_ok=True)


@pytest.mark.parametrize("count", [3, 10, 299, 1000])
def test_smoothing_equals_the_mean_of_each_window(count):
    values = [math.sin(index * index) for index in range(count)]
    reach = max(1, round(0.02 * count))
    windows = [values[max(0, index - reach) : index + reach + 1] for index in range(count)]
    assert smoothed(values) == pytest.approx([math.fsum(window) / len(window) for window in windows], abs=1e-15)


def test_one_huge_value_changes_only_the_means_that_include_it():
    means = smoothed([2.0] * 10 + [1e17] + [2.0] * 989)
    assert means[31:] == [2.0] * 969 and means[10] == pytest.approx(1e17 / 31)
    assert smoothed([1.7e308, 1.7e308, 2.0, 2.0])[0] == 1.7e308


class Counted(list[float]):
    """Values that count how many of them were copied by slices."""

    copied = 0

    def __getitem__(self, index: Any) -> Any:
        taken = super().__getitem__(index)
        self.copied += len(taken) if isinstance(index, slice) else 1
        return taken


def test_smoothing_a_million_values_does_not_read_each_of_them_thousands_of_times():
    """A report of a run of half a million steps took minutes."""
    values = Counted([float(step % 7) for step in range(20_000)])
    assert len(smoothed(values)) == 20_000 and values.copied <= 2 * 20_000


def test_the_curve_in_letters_falls_and_names_the_step_of_the_kill():
    lines = loss_curve([8.0 - step / 10 for step in range(60)], width=40, marks=[(30, "killed")]).split("\n")
    assert lines[0].startswith("  7.95") or lines[0].startswith("  8.0") or lines[0].startswith("  7.9")
    assert lines[0].rstrip().endswith("█") is False or len(lines[0]) < len(lines[8])
    assert len(lines[8]) == 7 + 40 and lines[-1].strip() == "^ step 30: killed"
