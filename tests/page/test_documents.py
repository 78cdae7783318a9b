"""What sweep, trace, measure step and report find, as one file each: drawn in a browser, and the numbers of --json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train.small_runs import make_corpus, small_run

from ultrascale.cli.main import main
from ultrascale.cli.measure.measure_command import _show
from ultrascale.config.resolve import to_toml
from ultrascale.description.run import Batch
from ultrascale.measure.plots import smoothed
from ultrascale.measure.run_marks import RunMark
from ultrascale.page.documents import run_document, stages_document, step_document, sweep_document, trace_document
from ultrascale.page.html_file import document_file


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    make_corpus(folder / "tokens")
    run = small_run(folder, batch=Batch(sequence_length=12, sequences_per_batch=4))
    (folder / "run.toml").write_text(to_toml(run))
    return folder / "run.toml"


def cells(document, title):
    """Rows of the table under a title."""
    (found,) = [one["part"]["rows"] for one in document["sections"] if one["title"] == title]
    return found


def inside(path: Path):
    """The document in a file."""
    text = path.read_text()
    assert len(text) < 1_000_000
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
    start = text.index('id="found">') + len('id="found">')
    return json.loads(text[start : text.index("</script>", start)])


def test_a_trace_is_one_file_with_the_numbers_of_its_json(run_file, tmp_path, capsys):
    path = tmp_path / "trace.html"
    assert main(["trace", str(run_file), "--json", "--html", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    document = inside(path)
    assert document == json.loads(json.dumps(trace_document(told)))
    areas = document["sections"][0]["part"]
    assert areas["top"]["value"] == max(sum(row) for row in areas["rows"])
    assert areas["top"]["value"] == max(sum(point["bytes"].values()) for point in told["timeline"])
    assert [mark["text"] for mark in areas["marks"]] == ["step 1", "step 2"]
    assert len(cells(document, "Memory, traced and planned")) == len(told["comparison"]["memory"])
    assert f"ultrascale trace {run_file} --json --html {path}" in path.read_text()


def test_every_stage_has_a_bar(run_file, tmp_path, capsys):
    path = tmp_path / "stages.html"
    words = ["--all-stages", "--layout.pp", "2", "--layout.dp", "1", "--cluster", "2xh100"]
    assert main(["trace", str(run_file), *words, "--html", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    bars = inside(path)["sections"][0]["part"]["rows"]
    assert [bar["parts"][0]["value"] for bar in bars] == [one["traced_bytes"] for one in told]
    assert len(stages_document(told)["sections"]) == 1


def test_a_profiled_step_is_one_file(run_file, tmp_path, capfd):
    path = tmp_path / "step.html"
    words = ["--steps", "3", "--out", str(tmp_path / "profile"), "--json", "--html", str(path)]
    assert main(["measure", "step", str(run_file), *words]) == 0
    told = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    document = inside(path)
    assert document == json.loads(json.dumps(step_document(told)))
    bar = document["sections"][0]["part"]["rows"][-1]
    assert bar["label"] == "rank 0"
    assert sum(part["value"] for part in bar["parts"]) == pytest.approx(told["step_seconds"])
    _show(tmp_path / "profile", path, top=0, as_json=False)
    assert capfd.readouterr().out.splitlines()[-1].strip() == str(path)


def test_a_sweep_is_one_file(run_file, tmp_path, capfd):
    path = tmp_path / "sweep.html"
    words = ["--layout.micro-batch-size", "1,4,3", "--steps", "1", "--warm", "1", "--out", str(tmp_path / "cells")]
    assert main(["sweep", str(run_file), *words, "--json", "--html", str(path)]) == 0
    told = json.loads(capfd.readouterr().out)
    document = inside(path)
    assert document == json.loads(json.dumps(sweep_document(told)))
    assert sorted(row[0] for row in cells(document, "Cells, the fastest first")) == ["micro_batch_size 1", "micro_batch_size 4"]
    (points,) = [one["part"]["points"] for one in document["sections"] if one["part"]["kind"] == "points"]
    assert sorted(point["y"] for point in points) == sorted(one["measured_peak_bytes"] for one in told["measured"])
    assert [row[0] for row in cells(document, "Refused")] == ["layout.micro_batch_size 3"]


METRICS = [{"step": step, "train/loss": 7.0 - step / 10, "perf/tokens_per_s": 100.0 + step} for step in range(5)]


def test_a_run_is_one_file(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    path = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--html", str(path)]) == 0
    assert f"page      {path}" in capsys.readouterr().out
    sections = inside(path)["sections"]
    assert [one["title"] for one in sections] == ["Loss", "Tokens per second"]
    assert sections[0]["part"]["series"][0]["points"][-1] == [5, 6.6, "6.6000"]


def test_of_a_long_run_a_thousand_steps_are_drawn():
    metrics = [{"step": step, "train/loss": 3.0} for step in range(100_000)]
    (section,) = run_document([], metrics, "out")["sections"]
    assert [len(one["points"]) for one in section["part"]["series"]] == [1000, 1000]


def test_the_loss_and_the_speed_are_smoothed_and_marked_as_the_pictures_are():
    metrics = [
        {"step": step, "train/loss": 5.0 - step % 2, "perf/tokens_per_s": 9.0, "train/lr": 1.0} for step in range(1, 101)
    ]
    marks = [RunMark(46, "killed"), RunMark(50, "resumed as tp2 (was dp2)")]
    parts = [one["part"] for one in run_document([], metrics, "out", marks)["sections"]]
    told = [[(one["name"], one["faint"]) for one in part["series"]] for part in parts]
    speed = [("perf/tokens_per_s", True), ("perf/tokens_per_s, smoothed", False)]
    assert told == [[("train/loss", True), ("train/loss, smoothed", False)], speed, [("train/lr", False)]]
    assert [value for _, value, _ in parts[0]["series"][1]["points"]] == smoothed([row["train/loss"] for row in metrics])
    assert all(part["marks"] == [{"at": mark.step, "text": mark.text} for mark in marks] for part in parts)


def test_the_loss_on_each_of_several_validation_corpora_is_drawn():
    metrics = [{"step": step, "val/loss": 4.0, "val/loss/code": 3.0, "val/loss/a/b": 3.0, "val/lossy": 1.0} for step in (1, 2)]
    (section,) = run_document([], metrics, "out")["sections"]
    assert [series["name"] for series in section["part"]["series"]] == ["val/loss", "val/loss/code", "val/loss/a/b"]


@pytest.mark.parametrize("verb", [["trace"], ["sweep", "--layout.micro-batch-size", "1,4"], ["measure", "step"]], ids=" ".join)
def test_where_no_file_can_be_written_nothing_is_begun(verb, run_file, tmp_path, capsys):
    name, *rest = verb
    words = [name, "step", str(run_file)] if rest == ["step"] else [name, str(run_file), *rest]
    assert main([*words, "--html", str(tmp_path / "nowhere" / "x.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main([*words, "--html", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_every_part_is_drawn_by_a_browser_at_a_phones_width(tab, tmp_path):
    """All kinds of parts in one document."""
    bars = {"label": "rank 0", "text": "2 s", "parts": [{"colour": 0, "label": "dp", "value": 2.0, "text": "2 s"}]}
    point = {"x": 1.0, "y": 2.0, "text": "cell", "x_text": "1", "y_text": "2"}
    parts = [
        {"kind": "table", "columns": ["a", "b"], "rows": [["1", "<b>2</b>"]], "left_out": 3},
        {"kind": "bars", "rows": [bars]},
        {"kind": "areas", "names": ["parameters"], "colours": [0], "rows": [[1], [2]], "marks": [{"at": 0, "text": "step 1"}],
         "top": {"value": 2, "text": "2 B"}},
        {"kind": "lines", "series": [
            {"name": f"train/loss{ending}", "points": [[1, 7.0, "7.0"], [3, 6.0, "6.0"]], "faint": not ending}
            for ending in ("", ", smoothed")],
         "marks": [{"at": 2, "text": "killed"}, {"at": 9, "text": "after the end"}]},
        {"kind": "points", "points": [point, point | {"x": 2.0}], "across": "planned", "up": "measured"},
    ]  # fmt: skip
    sections = [{"title": one["kind"], "about": "", "part": one} for one in parts]
    path = tmp_path / "all.html"
    path.write_text(document_file({"verb": "trace", "title": "</script>", "facts": [], "sections": sections}, "ultrascale"))
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto(path.as_uri())
    tab.wait_for_selector("#part-4 circle")
    assert tab.locator("h2").all_inner_texts() == ["</script>", "table", "bars", "areas", "lines", "points"]
    assert "<b>2</b>" in tab.inner_text("#part-0")
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    tab.locator("#part-4 circle").first.focus()
    assert tab.inner_text("#part-4 .told") == "cell"
    tab.locator("#part-3 svg").hover()
    assert tab.inner_text("#part-3 .told").startswith("train/loss ") and "killed" in tab.inner_html("#part-3 svg")
    assert tab.locator("#part-3 .legend i").evaluate_all("all => all.map((one) => one.className)") == ["k0 faint", "k0"]
    assert "after the end" not in tab.inner_html("#part-3 svg")
