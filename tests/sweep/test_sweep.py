"""A sweep as people use it: cells measured by processes of their own, failures kept apart, and nothing measured twice."""

from __future__ import annotations

import csv
import fcntl
import json
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from train.small_runs import make_corpus, small_run

from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.run import Batch, Run
from ultrascale.sweep import measured as at_work
from ultrascale.sweep.accuracy import MeasuredCell, fastest_first, plan_accuracy
from ultrascale.sweep.cells import NEEDED, CellPlace, Failure, place_of
from ultrascale.sweep.grid import Axis, SweepCell
from ultrascale.sweep.measured import failure_of, measure_cell, measure_cells
from ultrascale.sweep.pictures import best_by
from ultrascale.sweep.rows import write_rows
from ultrascale.validation.rows import read_rows

ZERO = Axis("layout.zero_stage", ("0", "3"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("sweep")
    make_corpus(folder / "tokens")
    run = small_run(folder, batch=Batch(sequence_length=12, sequences_per_batch=8))
    (folder / "run.toml").write_text(to_toml(run))
    return run


def test_cells_are_measured_beside_the_plan_and_stay_measured(run, tmp_path, capfd):
    words = ["sweep", f"{run.folder}/run.toml", "--layout.micro-batch-size", "2,3", "--layout.zero-stage", "0,3"]
    words += ["--steps", "2", "--warm", "2", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    told = json.loads(capfd.readouterr().out)
    values = [one["values"] for one in told["measured"]]
    assert sorted(one["layout.micro_batch_size"] for one in values) == ["2", "2"]
    assert {one["values"]["layout.micro_batch_size"] for one in told["refused"]} == {"3"}
    assert told["failed"] == []
    for one in told["measured"]:
        assert len(one["step_seconds"]) == 2
        assert one["measured_peak_bytes"] == pytest.approx(one["planned_peak_bytes"], rel=0.02)
        assert resolve(one["run"]).run.layout.micro_batch_size == int(one["values"]["layout.micro_batch_size"])
    assert [Path(picture).name for picture in told["pictures"]] == ["speed.png", "memory.png"]
    assert all(Path(picture).stat().st_size > 10_000 for picture in told["pictures"])
    rows = read_rows(tmp_path / "results.csv")
    assert [row.config.zero_stage for row in rows] == ["0", "3"]
    assert all(row.measured.step_time_s and row.measured.peak_mem_gib for row in rows)

    assert main(words) == 0
    assert json.loads(capfd.readouterr().out)["measured"] == told["measured"]  # no two times are alike


def test_a_table_for_people_and_a_list_of_what_would_be_measured(run, tmp_path, capfd):
    words = ["sweep", f"{run.folder}/run.toml", "--layout.recompute", "none,full", "--steps", "1", "--warm", "1"]
    words += ["--out", str(tmp_path)]
    assert main([*words, "--list"]) == 0
    assert re.search(r"2 cells, 0 refused, 0 measured before; in .*\n\nfiles\n", capfd.readouterr().out)
    assert len([*tmp_path.glob("cells/*/run.toml")]) == 2
    assert main(words) == 0
    told = capfd.readouterr().out
    assert "[2/2] recompute full: " in told
    header = next(line for line in told.splitlines() if "MFU" in line)
    assert header.split() == ["step", "tokens/s", "a", "rank", "MFU", "memory", "planned", "recompute"]
    off = re.search(r"planned memory: median error ([\d.]+)%, 90th percentile ([\d.]+)%, mean .*, over 2 cells", told)
    assert off is not None and max(map(float, off.groups())) < 2
    assert f"next  ultrascale train {tmp_path}" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep", "nowhere.toml", "--layout.dp", "1,2"], "nowhere.toml"),
        (["sweep", "RUN", "--steps", "0"], "--steps"),
        (["sweep", "RUN", "--minutes", "nan"], "--minutes"),
        (["sweep", "RUN", "--layout.depth", "1,2"], "layout.depth"),
        (["sweep", "RUN", "--out", "RUN"], "is a file"),
        (["sweep", "RUN", "--out", "", "--list"], "is empty: a path of no letters"),
    ],
)
def test_mistakes_end_with_2_and_say_what_to_do(words, told, run, capfd):
    assert main([word.replace("RUN", f"{run.folder}/run.toml") for word in words]) == 2
    assert told in capfd.readouterr().err


def _place(folder: Path, run: Run) -> CellPlace:
    return place_of(folder, SweepCell({ZERO.key: "0"}, run), [ZERO], steps=1, warm=1)


def _instead(monkeypatch, program: str) -> None:
    """Let cells run this Python program instead."""
    monkeypatch.setattr(at_work, "command_of", lambda *_, **__: [sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("program", "limit", "outcome", "text"),
    [
        ("import time; time.sleep(600)", 0.2, "too slow", "not done after 0 s"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60, "killed", "no memory left"),
        ("print('ultrascale: error on rank 3: ran out of memory (x)'); raise SystemExit(1)", 60, "out of memory", "(x)"),
        ("print('a'); print('b'); raise SystemExit(1)", 60, "failed", "b"),
        ("pass", 60, "failed", "it said nothing"),  # ended well, and wrote no result
    ],
)  # fmt: skip
def test_a_cell_that_fails_says_how(program, limit, outcome, text, run, tmp_path, monkeypatch):
    place = _place(tmp_path, run)
    _instead(monkeypatch, program)
    measure_cell(place, steps=1, warm=1, limit_seconds=limit)
    assert place.failure is not None and place.result is None
    assert place.failure.outcome == outcome
    assert text in place.failure.text


def test_what_failed_is_measured_once_more_only_if_asked(run, tmp_path, monkeypatch, capfd):
    words = [
        "sweep",
        f"{run.folder}/run.toml",
        "--layout.zero-stage",
        "0,3",
        "--steps",
        "1",
        "--warm",
        "1",
        "--out",
        str(tmp_path),
    ]
    _instead(monkeypatch, "print('no luck'); raise SystemExit(1)")
    assert main(words) == 1
    told = capfd.readouterr().out
    assert "failed: zero_stage 3: no luck" in told and "--again" in told
    _instead(monkeypatch, "print('never'); raise SystemExit(1)")
    assert main(words) == 1
    assert "never" not in capfd.readouterr().out
    assert main([*words, "--again"]) == 1
    assert "failed: zero_stage 3: never" in capfd.readouterr().out


def test_ctrl_c_ends_the_process_at_work_and_leaves_its_cell_unmeasured(run, tmp_path, monkeypatch):
    place = _place(tmp_path, run)
    _instead(monkeypatch, "import time; time.sleep(600)")
    waited = at_work.subprocess.Popen.wait
    processes = []

    def wait(process, timeout=None):
        processes.append(process)
        if len(processes) == 1:
            raise KeyboardInterrupt
        return waited(process, timeout)

    monkeypatch.setattr("subprocess.Popen.wait", wait)
    with pytest.raises(KeyboardInterrupt):
        measure_cell(place, steps=1, warm=1, limit_seconds=600)
    assert processes[0].returncode == -signal.SIGTERM
    assert place.failure is None and place.result is None


@pytest.mark.parametrize(
    "held", [b"", b"null", b"[1]", b'{"a": 1}', b'{"step_seconds": []', b"\xff\xfe", "without mfu", "no steps", "half a pair"]
)
def test_a_damaged_file_or_another_versions_is_no_result_and_no_failure(held, run, tmp_path):
    place = _place(tmp_path, run)
    _measured(place, 1.0, None)
    told = json.loads(place.result_file.read_text())
    if held == "without mfu":
        held = json.dumps({key: value for key, value in told.items() if key != "mfu"}).encode()
    elif held == "no steps":
        held = json.dumps(told | {"step_seconds": []}).encode()
    elif held == "half a pair":
        held = json.dumps(told | {"device": "\ud800", "outcome": "killed", "text": "\ud800"}).encode()
    place.result_file.write_bytes(held)
    (place.path / "failed.json").write_bytes(held)
    assert place.result is None and place.failure is None and fastest_first([place]) == []
    (place.path / "failed.json").write_text('{"outcome": "unheard of", "text": "x"}')
    assert place.failure is None
    (place.path / "failed.json").write_text('{"outcome": "killed", "text": "x", "of a later version": 1}')
    assert place.failure == Failure("killed", "x")


def test_what_is_needed_of_a_result_is_what_measure_speed_writes():
    from ultrascale.train.speed import Speed

    assert set(NEEDED) <= {field.name for field in fields(Speed)}


def test_a_result_that_is_not_understood_is_kept_when_its_cell_is_measured_anew(run, tmp_path):
    place = _place(tmp_path, run)
    place.prepare()
    place.result_file.write_text('{"version": 9}')
    place.prepare()
    assert place.result_file.with_suffix(".not-understood.json").read_text() == '{"version": 9}'


def test_a_cell_that_another_command_measures_is_left_to_it(run, tmp_path, monkeypatch):
    """The process that measures holds the claim: also when the command that started it was killed."""
    place = _place(tmp_path, run)
    place.prepare()
    told: list[CellPlace] = []
    with place.log_file.open("ab") as log:
        log.write(b"at work")
        log.flush()
        other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
        fcntl.flock(log, fcntl.LOCK_EX)
    _instead(monkeypatch, "print('never'); raise SystemExit(1)")
    try:
        measure_cells([place], steps=1, warm=1, limit_seconds=60, done=told.append)
        assert (told, place.failure, place.log_file.read_text()) == ([place], None, "at work")
    finally:
        other.kill()
        other.communicate()
    measure_cells([place], steps=1, warm=1, limit_seconds=60, done=told.append)
    assert place.failure is not None and place.log_file.read_text() == "never\n"


def test_a_sweep_is_started_once_and_not_by_every_rank(run, tmp_path, capfd, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["sweep", f"{run.folder}/run.toml", "--layout.dp", "1,2", "--out", str(tmp_path / "new")]) == 2
    assert "each would measure every cell" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "said", ["torch.OutOfMemoryError: CUDA out of memory. Tried", "ncclUnhandledCudaError: Cuda failure 'out of memory'"]
)
def test_memory_that_ran_out_in_a_library_is_told_as_such(said):
    assert failure_of(1, f"{said}\n").outcome == "out of memory"


def test_how_a_process_failed_is_read_off_what_it_printed():
    assert failure_of(1, "x\nMemoryError\n") == Failure("out of memory", "MemoryError", 1)
    assert failure_of(1, "ultrascale: error: rank 1 was ended by SIGKILL.\n").outcome == "killed"
    assert failure_of(-signal.SIGSEGV, "").text == "ended by SIGSEGV"
    listed = "ultrascale: error: cannot go on:\n\n  text\n    cannot be read\n    -> Check it.\nGood bye.\n"
    assert failure_of(1, listed).text == "cannot go on: text cannot be read -> Check it."


def _measured(place: CellPlace, seconds: float, planned: float | None, *, torch: str = "2.13.0") -> MeasuredCell:
    told = {
        "step_seconds": [seconds] * 3, "tokens_per_step": 100, "ranks": 1, "mfu": 0.5, "planned_step_seconds": planned,
        "planned_peak_bytes": 110, "measured_peak_bytes": 100, "planned_reserved_bytes": None, "measured_reserved_bytes": None,
        "device": "H100", "environment": {"torch": torch, "ultrascale": "0.1.0"},
    }  # fmt: skip
    place.prepare()
    place.result_file.write_text(json.dumps(told))
    found = MeasuredCell.of(place)
    assert found is not None
    return found


def test_the_plan_is_held_to_what_was_measured(run, tmp_path):
    """Planned to be fastest: the second, which is half as fast as the first."""
    place = _place(tmp_path, run)
    some = [_measured(place, 1.0, 2.0), _measured(place, 2.0, 1.0, torch="2.11.0"), _measured(place, 4.0, 4.0)]
    held = plan_accuracy(some)
    assert held.time is not None and held.memory is not None
    assert held.time.count == 3 and held.time.bias == pytest.approx((1.0 - 0.5 + 0.0) / 3)
    assert held.memory.median_absolute == pytest.approx(0.1)
    assert held.regret == pytest.approx(1.0)
    assert held.tau == pytest.approx(1 / 3)
    assert len(held.machines) == 2 and held.reserved is None


def test_the_fastest_comes_first_and_failures_are_rows_too(run, tmp_path):
    cells = [
        SweepCell({ZERO.key: value}, resolve(f"{run.folder}/run.toml", {"layout.zero_stage": value}).run)
        for value in ("0", "3")
    ]
    places = [place_of(tmp_path, cell, [ZERO], steps=1, warm=1) for cell in cells]
    assert places[0].path != places[1].path
    places[0].prepare()
    places[0].fail(Failure("out of memory", "none left"))
    _measured(places[1], 2.0, None)
    assert [one.place for one in fastest_first(places)] == [places[1]]
    write_rows(tmp_path / "rows.csv", places)
    with (tmp_path / "rows.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [(row["outcome"], row["step_time_s"]) for row in rows] == [("oom", ""), ("ok", "2")]
    other = Axis("layout.tp", ("1",))
    placed = [SweepCell(cell.values | {other.key: "1"}, cell.run) for cell in cells]
    again = [CellPlace(cell, place.run, place.path) for cell, place in zip(placed, places, strict=True)]
    assert best_by(ZERO, other, placed, again, fastest_first(again)) == [["OOM"], [50.0]]


def test_what_was_measured_is_reported_though_the_last_cell_cannot_start(run, tmp_path, monkeypatch, capfd):
    """A sweep that finds its data gone, and has a result already; without one it says so and measures nothing."""
    words = ["sweep", f"{run.folder}/run.toml", "--layout.zero-stage", "0,3", "--data.sources", str(tmp_path / "nowhere")]
    words += ["--steps", "1", "--warm", "1", "--out", str(tmp_path / "out"), "--json"]
    _instead(monkeypatch, "print('no data'); raise SystemExit(1)")
    assert main(words) == 2
    assert not (tmp_path / "out" / "results.csv").exists()
    (first,) = (tmp_path / "out" / "cells").glob("*zero_stage0*")
    _measured(CellPlace(SweepCell({ZERO.key: "0"}, run), run, first), 1.0, 2.0)
    capfd.readouterr()
    assert main(words) == 0
    told = json.loads(capfd.readouterr().out)
    assert [one["values"][ZERO.key] for one in told["measured"]] == ["0"]
    assert [(one["values"][ZERO.key], one["text"]) for one in told["failed"]] == [("3", "no data")]
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 3


def test_a_machine_whose_file_was_changed_is_planned_for_anew(run, tmp_path):
    file = tmp_path / "ours.toml"
    places = []
    for cards in (1, 2):
        file.write_text(f'accelerator = "h100"\naccelerators = {cards}\n')
        places.append(_place(tmp_path, replace(run, cluster=f"1x{file}")))
    assert places[0].path != places[1].path == _place(tmp_path, replace(run, cluster=f"1x{file}")).path
