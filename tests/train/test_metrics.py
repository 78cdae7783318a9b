"""What a run says about itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from train.small_runs import STEPS, rows, small_run, stop_at, train_here, train_ranks

from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Data, Evaluation, Log, Source
from ultrascale.description.sections.islands import Islands
from ultrascale.measure.machine.ceilings import Peak
from ultrascale.run_rows import metric_line
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.observers import metrics
from ultrascale.train.observers.metrics import Metrics, console_line, duration

ALWAYS = {
    "schema", "step", "time", "train/loss", "train/grad_norm", "train/lr", "progress/tokens", "progress/tokens_per_batch",
    "plan/peak_gib",
}  # fmt: skip
SPEED = {"perf/step_s", "perf/data_wait_s", "perf/tokens_per_s", "perf/tokens_per_s_per_gpu", "perf/mfu", "perf/hfu"}


def read_rows(run) -> list[dict]:
    return [json.loads(line) for line in (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()]


def test_metrics_have_the_names_people_know_and_speed_once_memory_is_counted(home):
    run = small_run(home, log=Log(memory_steps=2))
    train_here(run)
    found = [row.keys() for row in read_rows(run)]
    # The step that ends the counting is slow too.
    assert [keys == ALWAYS for keys in found] == [True] * 2 + [False] * (STEPS - 2)
    assert all(keys == ALWAYS | SPEED for keys in found[2:])
    report = json.loads((home / "small" / "memory.json").read_text())
    assert report["planned_timeline"] and report["measured_timeline"]


@pytest.mark.parametrize(
    "islands", [Islands(), Islands(count=2, every_steps=1), Islands(count=2, every_steps=2, overlap_steps=1)]
)
def test_what_saves_and_islands_copy_to_the_host_is_not_memory_of_the_device(home, islands):
    """They copy between steps, and on a CPU to the memory that is counted."""
    log, checkpoint = Log(memory_steps=4), Checkpoint(every_steps=1, asynchronous=True, export=False)
    run = small_run(home, steps=6, log=log, checkpoint=checkpoint, islands=islands)
    assert all("error" not in outcome for outcome in train_ranks(run))
    report = json.loads((home / "small" / "memory.json").read_text())
    assert abs(report["difference_percent"]) < 0.5


def test_an_evaluation_of_a_pipeline_is_no_phase_of_a_step(home):
    """What is saved after it is copied between steps all the same."""
    source = Source(str(home / "tokens"))
    run = small_run(
        home, steps=4, log=Log(memory_steps=4), checkpoint=Checkpoint(every_steps=1, asynchronous=True, export=False),
        layout=Layout(micro_batch_size=2, pp=2), evaluation=Evaluation(every_steps=1, sequences=8),
        data=Data(sources=(source,), validation=(source,)),
    )  # fmt: skip
    assert all("error" not in outcome for outcome in train_ranks(run))
    assert abs(json.loads((home / "small" / "memory.json").read_text())["difference_percent"]) < 0.5


def test_speeds_agree_with_each_other(home):
    run = small_run(home)
    train_here(run)
    for row in read_rows(run)[1:]:
        tokens, mfu, hfu = (row[f"perf/{name}"] for name in ("tokens_per_s", "mfu", "hfu"))
        assert (
            tokens == row["perf/tokens_per_s_per_gpu"] == pytest.approx(row["progress/tokens_per_batch"] / row["perf/step_s"])
        )
        assert 0 < mfu <= hfu < 1.1 * mfu  # nothing is recomputed but inside attention


def test_a_peak_that_a_step_exceeds_is_told_once_and_gives_no_mfu(home, known_peak):
    known_peak(Peak(1.0, "a slow product"))
    run = small_run(home)
    train_here(run)
    assert all(row.keys() == ALWAYS | SPEED - {"perf/mfu", "perf/hfu"} for row in read_rows(run)[1:])
    log = (home / "small" / "log.txt").read_text()
    assert log.count("warning: the peak of 1e-12 TFLOP/s (a slow product) is too low") == 1
    assert log.count("mfu >100%") == STEPS - 1


def test_the_first_step_after_a_start_or_resume_has_no_speed(home):
    run = small_run(home)
    train_here(run, before_step=stop_at(5))
    train_here(run)
    assert [row["step"] for row in read_rows(run) if "perf/step_s" not in row] == [1, 6]


def test_the_planned_peak_stands_in_every_row_and_is_that_of_the_whole_batch(home):
    run = small_run(home)
    train_here(run)
    plan = json.loads((home / "small" / "plan.json").read_text())
    assert {gib for (gib,) in rows(run, "plan/peak_gib")} == {plan["memory"]["peak_bytes"] / 2**30}


def test_the_row_after_a_save_says_how_long_training_waited_for_it(home):
    run = small_run(home, checkpoint=Checkpoint(every_steps=5, export=False))
    train_here(run)
    saves = {row["step"]: row["perf/save_s"] for row in read_rows(run) if "perf/save_s" in row}
    assert list(saves) == [6, 11] and min(saves.values()) > 0


@pytest.mark.parametrize("memory_steps, stop", [(4, 2), (40, None)], ids=["stopped", "longer than the run"])
def test_a_run_shorter_than_its_memory_count_ends_well_and_one_that_goes_on_counts_no_more(home, memory_steps, stop):
    run = small_run(home, log=Log(memory_steps=memory_steps))
    assert train_here(run, before_step=None if stop is None else stop_at(stop)).steps_done == (stop or STEPS)
    assert (home / "small" / "memory.json").exists() == (stop is None)
    assert train_here(run).steps_done == STEPS
    if stop is not None:
        assert all("perf/mfu" in row for row in read_rows(run)[stop + 1 :])


def test_rows_are_thinned_and_the_last_step_is_always_there(home):
    run = small_run(home, log=Log(memory_steps=0, every_steps=5))
    train_here(run)
    assert rows(run, "step") == [(5,), (10,), (12,)]


def test_a_run_folder_tells_everything_about_its_run(home):
    train_here(small_run(home))
    folder = home / "small"
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "run.toml", "plan.json", "metrics.jsonl", "events.jsonl", "environment.json", "log.txt", "checkpoints",
    }  # fmt: skip
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events == ["start", "stepped", "end"]


def test_the_console_line_says_what_is_known(home):
    run = small_run(home)
    values: metrics.Row = {"train/loss": 7.12344, "train/grad_norm": 0.981, "train/lr": 3e-4, "train/noise_scale_tokens": None}
    assert console_line(run, values, 3) == "step 3/12  loss 7.1234  gnorm 0.98  lr 3.0e-04  (speed not yet known)"
    values |= {"val/loss/code": 2.0, "val/loss/a/text": 3.0, "perf/mfu": 0.4123}
    values |= {"perf/tokens_per_s": 24691.2, "perf/tokens_per_s_per_gpu": 12345.6, "perf/step_s": 7.0}
    values |= {"mem/peak_allocated_gib": 61.23, "mem/peak_allocated_percent": 76.6}
    values["train/noise_scale_tokens"] = 1.234e6
    assert console_line(run, values, 3).partition("3.0e-04")[2] == (
        "  val code 2.0000  val a/text 3.0000  noise 1.23M  mem 61.2GiB (77%)  "
        "tok/s 24,691 (12,346 a gpu)  mfu 41.2%  eta 1m03s"
    )
    apart = replace(run, islands=replace(run.islands, count=2))
    assert "tok/s 24,691 on one island of 2 (12,346 a gpu)" in console_line(apart, values, 3)
    assert [duration(s) for s in (0.4, 62, 3720)] == ["0s", "1m02s", "1h02m"]


def test_only_the_first_rank_writes(home, capsys):
    silent = Metrics(small_run(home), RunFolder(home / "none"), first_step=0, writes=False)
    silent.row(0, {"train/loss": 1.0})
    silent.line("hello")
    silent.event("start")
    silent.report("memory.json", {})
    silent.close()
    assert not (home / "none").exists() and capsys.readouterr().out == ""


def test_a_row_torn_by_a_crash_and_rows_to_be_done_again_are_dropped(home):
    folder = RunFolder(home / "torn")
    folder.path.mkdir()
    for step in (1, 2, 3):
        folder.append("metrics.jsonl", metric_line(step, {}))
    whole = folder.metrics.read_text()
    with open(folder.metrics, "ab") as file:
        file.write(b'\xff{"st\n{"step": 4, "trai')
    assert [row["step"] for row in folder.metric_rows()] == [1, 2, 3]
    folder.forget_metrics_from(2)
    assert folder.metrics.read_text() == "".join(whole.splitlines(keepends=True)[:2])


@pytest.mark.parametrize("damage", [b"", b'{"torch": ', b"\xff\xfe\x00{", b"[" * 100_000], ids=range(4))
def test_a_damaged_file_of_the_folder_reads_as_missing(home, damage):
    folder = RunFolder(home / "damaged")
    folder.path.mkdir()
    (folder.path / "environment.json").write_bytes(damage)
    assert folder.read_json("environment.json") is None


@pytest.mark.parametrize("write", ["write_text", "append"])
def test_a_file_of_the_folder_that_cannot_be_written_is_named_with_the_folder(home, write):
    """Files are opened by their name in a folder held open; a person needs to know in which."""
    place = RunFolder(home / "full")
    place.path.mkdir()
    (place.path / "run.toml").mkdir()
    with place.owned() as folder, pytest.raises(OSError) as caught:
        getattr(folder, write)("run.toml", "text")
    assert caught.value.filename == str(home / "full" / "run.toml")
    (place.path / ".lock").unlink()
    (place.path / ".lock").mkdir()
    with pytest.raises(IsADirectoryError) as caught, place.owned():
        pass
    assert caught.value.filename == str(home / "full" / ".lock")


def test_a_row_has_its_schema_and_the_number_that_the_log_and_the_checkpoint_have(home):
    train_here(small_run(home, checkpoint=Checkpoint(every_steps=5, export=False)))
    last, folder = read_rows(small_run(home))[-1], home / "small"
    assert (last["schema"], last["step"]) == ("ultrascale/metrics/1", STEPS)
    assert f"step {STEPS}/{STEPS} " in (folder / "log.txt").read_text() and (folder / f"checkpoints/step-{STEPS:08}").is_dir()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert {row["schema"] for row in events} == {"ultrascale/events/1"} and events[-1]["step"] == STEPS


def test_a_run_with_rows_of_an_earlier_release_goes_on_and_every_step_stands_there_once(home):
    """Those count steps from 0, and have no schema. Of seven the last two are done again."""
    run = small_run(home)
    train_here(run, before_step=stop_at(5))
    folder = RunFolder(home / "small")
    new = folder.metric_rows()
    old = [{key: value for key, value in row.items() if key != "schema"} | {"step": row["step"] - 1} for row in new]
    again = [old[-1] | {"step": step} for step in (5, 6)]
    folder.write_text("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in [*old[:2], *new[2:3], *old[3:], *again]))
    assert [row["step"] for row in folder.metric_rows()] == [1, 2, 3, 4, 5, 6, 7]
    train_here(run)
    assert rows(run, "step") == [(step,) for step in range(1, STEPS + 1)]
    assert {schema for (schema,) in rows(run, "schema")} == {"ultrascale/metrics/1"}
    assert folder.metric_rows()[:5] == new
