"""A run whose job ends saves and leaves before."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.small_runs import curve, make_corpus, same, small_run, state, train_here, train_ranks

from ultrascale.cli.main import main
from ultrascale.description.layout import Layout
from ultrascale.launch.events import longest_seconds
from ultrascale.train.watch.deadline import LEAVING_SECONDS, Deadline


def test_it_is_time_to_leave_when_two_steps_two_saves_and_leaving_would_take_what_is_left():
    one = Deadline(1000.0, save_seconds=20.0, now=lambda: 900.0)
    assert one.after_step(500.0, None) != ""  # the first step tells of the second until there is one
    assert one.after_step(14.0, None) == ""  # 2 x (14 + 20) + 30 < 100
    told = one.after_step(15.5, None)
    assert told == "the job's time is over in 100 s, of which a step, a save and leaving may take 101 s"
    assert one.after_step(1.0, None) == told  # the longest step counts, not the last
    assert Deadline(1000.0, now=lambda: 900.0).after_step(1.0, 40.0) != ""  # and the longest save


def test_nobody_leaves_without_a_time():
    assert Deadline(None).after_step(1e9, 1e9) == ""


def test_all_ranks_leave_at_one_step_although_only_one_clock_says_so_and_the_run_goes_on_to_the_same_bits(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, layout=Layout(dp=2, micro_batch_size=2))
    outcomes = train_ranks(run, leave_by=time.time() + LEAVING_SECONDS / 2)
    assert [one["steps_done"] for one in outcomes] == [1, 1] and all(one["stopped"] for one in outcomes)
    said = (tmp_path / run.name / "log.txt").read_text()
    assert "saving and leaving after step 1: the job's time is over in " in said
    train_ranks(run, leave_by=time.time() + 3600)
    calm = replace(run, name="calm")
    train_ranks(calm)
    assert curve(run) == curve(calm) and same(state(run), state(calm))


def test_the_log_says_why_all_left_if_another_rank_was_the_first_to_ask(tmp_path, monkeypatch):
    """Rank 0 writes the log; on a busy machine another one's step took longer, and it asked alone."""
    make_corpus(tmp_path / "tokens")
    after_step = Deadline.after_step

    def on_rank_1(deadline: Deadline, seconds: float, save_seconds: float | None) -> str:
        why = after_step(deadline, seconds, save_seconds)
        return why if torch.distributed.get_rank() else ""

    monkeypatch.setattr(Deadline, "after_step", on_rank_1)
    run = small_run(tmp_path, layout=Layout(dp=2, micro_batch_size=2))
    outcomes = train_ranks(run, leave_by=time.time() + LEAVING_SECONDS / 2)
    assert [one["steps_done"] for one in outcomes] == [1, 1] and all(one["stopped"] for one in outcomes)
    assert "left after step 1: the job's time is over in " in (tmp_path / run.name / "log.txt").read_text()


def test_the_command_passes_the_time_on_to_the_ranks_it_starts(tmp_path, monkeypatch):
    make_corpus(tmp_path / "tokens")
    monkeypatch.chdir(tmp_path)
    from ultrascale.config.resolve import to_toml

    run = small_run(tmp_path, name="here", steps=5000, layout=Layout(dp=2, micro_batch_size=2))
    Path("run.toml").write_text(to_toml(run))
    assert main(["train", "run.toml", "--leave-by", str(time.time() + LEAVING_SECONDS + 8)]) == 0
    events = [json.loads(row)["event"] for row in Path("here/events.jsonl").read_text().splitlines()]
    assert events[-1] == "stop"


@pytest.mark.parametrize("given", ["0", "inf", "-5"])
def test_a_time_that_is_past_is_refused(given, tmp_path, capsys):
    make_corpus(tmp_path / "tokens")
    from ultrascale.config.resolve import to_toml

    file = tmp_path / "run.toml"
    file.write_text(to_toml(small_run(tmp_path)))
    assert main(["train", str(file), "--leave-by", given]) == 2
    assert "must be a second of the wall clock that is to come" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()


def test_what_is_no_number_of_seconds_in_the_metrics_is_passed_over(tmp_path):
    rows = ['{"perf/save_s": 3.5}', '{"perf/save_s": null}', '{"perf/save_s": "9"}', '{"perf/save_s": true}', "torn {", "[1]"]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    assert longest_seconds(tmp_path / "metrics.jsonl", "perf/save_s") == 3.5
    assert longest_seconds(tmp_path / "none.jsonl", "perf/save_s") == 0.0


def test_a_deadline_in_one_process_saves_what_it_has(tmp_path):
    make_corpus(tmp_path / "tokens")
    outcome = train_here(small_run(tmp_path), leave_by=time.time() + 1)
    assert (outcome.steps_done, outcome.stopped) == (1, True)
