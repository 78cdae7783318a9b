"""`ultrascale report`: pictures and numbers of a run's folder."""

from __future__ import annotations

import json
from cProfile import Profile
from pathlib import Path
from typing import Any

import pytest
from matplotlib.legend import Legend

from ultrascale.cli.main import main
from ultrascale.measure import plots
from ultrascale.measure.plots import plot_noise_scale

PNG = b"\x89PNG"
NOISE = "train/noise_scale_tokens"


def write_run(folder: Path) -> None:
    rows: list[dict[str, float]] = [
        {"step": i, "train/loss": 8.0 - i, "progress/tokens": 512 * (i + 1), "progress/tokens_per_batch": 512} for i in range(5)
    ]
    for row, rate in zip(rows[2:], (100.0, 300.0, 200.0), strict=True):
        row |= {"perf/tokens_per_s": rate, "perf/mfu": rate / 1000, "perf/hfu": rate / 500, NOISE: 1024.0 + rate}
    rows[1]["val/loss"] = 7.5
    rows[3]["val/loss"] = 5.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "memory.json").write_text(json.dumps({"planned_peak_bytes": 102 * 2**20, "measured_peak_bytes": 100 * 2**20}))


def test_a_report_sums_up_a_run_and_draws_what_there_is(tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    pictures = [Path(picture) for picture in told.pop("pictures")]
    assert told == {
        "schema": "ultrascale/report/1",
        "steps": 5, "tokens": 2560, "first_loss": 8.0, "last_loss": 4.0, "validation_loss": {"val/loss": 5.5},
        "tokens_per_second": 200.0, "mfu": 0.2, "hfu": 0.4, "timed_since": 0, "planned_peak_bytes": 102 * 2**20,
        "measured_peak_bytes": 100 * 2**20, "memory_percent": 2.0, "noise_scale_tokens": 1224.0, "tokens_per_batch": 512,
        "of_one_island": False,
    }  # fmt: skip
    assert [picture.name for picture in pictures] == ["loss.png", "tokens_per_second.png", "noise_scale.png"]
    assert all(picture.parent == tmp_path / "plots" and picture.read_bytes()[:4] == PNG for picture in pictures)


def test_a_report_is_read_in_lines(tmp_path: Path, capsys) -> None:
    write_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "loss      8.0000 at first, 4.0000 at last" in out
    assert "102 MiB planned, 100 MiB measured at the peak of rank 0: 2.0% off" in out
    assert "512 tokens, noise scale 1.22k: 2.39 batches, a larger batch would save steps" in out


def test_a_folder_that_cannot_be_written_is_summed_up_without_pictures(tmp_path: Path, capsys) -> None:
    """Somebody else's run, a read-only mount, a full disk."""
    write_run(tmp_path)
    (tmp_path / "plots").write_text("no folder can be made here")
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--html", str(page)]) == 0
    told = capsys.readouterr()
    assert "loss      8.0000 at first, 4.0000 at last" in told.out and "picture" not in told.out and page.is_file()
    assert f"note: no pictures are drawn, {tmp_path / 'plots'}: " in told.err
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pictures"] == []


@pytest.mark.parametrize("starts, rate, since", [([0, 3], 250, 3), ([0, 4, 2], 200, 0), ([0, 3, 5], 250, 3)])
def test_the_speed_is_of_the_last_start_as_one_before_it_may_have_had_another_layout(
    tmp_path: Path, capsys, starts: list[int], rate: int, since: int
) -> None:
    write_run(tmp_path)
    events = "".join(json.dumps({"event": "start", "time": 5.0, "step": step}) + "\n" for step in starts)
    (tmp_path / "events.jsonl").write_text(events + "torn")
    assert main(["report", str(tmp_path)]) == 0
    told = f"{rate} tokens/s (median since the start at step {since})" if since else f"{rate} tokens/s (median"
    out = capsys.readouterr().out
    assert told in out
    assert ("in the first steps, before the start at step 3:" in out) == bool(since)  # memory is counted there alone


def test_the_picture_has_the_median_of_the_summary(tmp_path: Path, figures: list[Any]) -> None:
    write_run(tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "start", "time": 5.0, "step": 3}) + "\n")
    plots.plot_run_folder(tmp_path, plots.read_metrics(tmp_path / "metrics.jsonl"))
    labels = [line.get_label() for figure in figures for line in figure.axes[0].lines]
    assert "median 250 after step 3" in labels


def test_the_rows_of_a_run_of_weeks_are_read_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    profile = Profile()
    assert profile.runcall(main, ["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    calls = [call.callcount for call in profile.getstats() if getattr(call.code, "co_name", "") == "read_metrics"]
    assert calls == [1]


def test_no_legend_is_placed_by_all_points_of_a_curve(tmp_path: Path, figures: list[Any]) -> None:
    write_run(tmp_path)  # "best" takes seconds for a run of weeks, and warns
    plots.plot_run_folder(tmp_path, plots.read_metrics(tmp_path / "metrics.jsonl"))
    places = [figure.axes[0].get_legend()._get_loc() for figure in figures]
    assert len(places) >= 3 and Legend.codes["best"] not in places


def test_a_run_that_logged_nothing_but_losses_is_reported_too(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": 2.0}\n')
    assert main(["report", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["steps", "loss", "picture"]


@pytest.mark.parametrize("text", [None, "", '{"ste'])
def test_a_folder_without_a_step_is_refused(tmp_path: Path, capsys, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert "Give the folder of a run that has trained" in capsys.readouterr().err


TORN = [b'{"ste', b"", b"\xff\xfe", b"[" * 100_000, b"[1]", b"{}", b'{"step": "2"}']


@pytest.mark.parametrize("line", TORN, ids=range(len(TORN)))
def test_a_broken_line_among_the_rows_is_named_with_its_file(tmp_path: Path, capsys, line: bytes) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"step": 0, "train/loss": 2.0}\n' + line + b'\n{"step": 2, "train/loss": 1.0}\n')
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"{metrics}:2\n" in told and "Remove this line" in told and "Traceback" not in told


@pytest.mark.parametrize("text", ['{"planned', "[]"])
def test_a_broken_file_of_memory_is_named(tmp_path: Path, capsys, text: str) -> None:
    write_run(tmp_path)
    (tmp_path / "memory.json").write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "memory.json") in told and "Remove it" in told and "Traceback" not in told


def test_the_noise_scale_is_drawn_on_a_log_axis_beside_the_batch_of_each_step(tmp_path: Path, figures: list[Any]) -> None:
    rows = [{"step": i, NOISE: 1000.0 * 2**i, "progress/tokens_per_batch": 512 * (1 + i // 2)} for i in range(4)]
    plot_noise_scale([{"step": 9, "train/loss": 1.0}, *rows], tmp_path / "noise_scale.png")
    axes = figures[0].axes[0]
    noise, batch = axes.get_lines()
    assert axes.get_yscale() == "log"
    assert list(noise.get_ydata()) == [1000, 2000, 4000, 8000]
    assert list(batch.get_ydata()) == [512, 512, 1024, 1024]
