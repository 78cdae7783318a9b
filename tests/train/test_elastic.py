"""A run that loses ranks and gains some again goes on as if nothing were, in layouts that the planner chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from launch.families import ended_after
from train.small_runs import STEPS, largest_error, rows, small_run, state, stop_at, train_here, train_ranks

from ultrascale.cli.main import main
from ultrascale.config.resolve import to_toml
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.failpoints import VARIABLE
from ultrascale.plan.search.elastic import elastic_layout

PATIENCE = 280.0
"""Seconds for a command of ten where nobody else computes."""
OTHER_AXES = "tp 1, cp 1, pp 1, ep 1, zero_stage 3, micro_batch_size 1"


@pytest.mark.catalogue(13)
def test_fewer_and_more_ranks_train_the_same_to_rounding(home):
    whole = small_run(home, name="whole", layout=Layout(precision="fp64", micro_batch_size=2))
    train_here(whole)
    run = small_run(home, name="elastic", layout=Layout(precision="fp64", dp=4, zero_stage=3))
    for world, until in ((4, 4), (2, 8), (4, STEPS)):
        run = replace(run, layout=elastic_layout(run, world))
        expect_trainable(run.model, run.layout)
        assert run.layout.world_size == world
        outcomes = train_ranks(run, before_step=stop_at(until))
        assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [until] * world, run.layout
    found, expected = (np.array(rows(one, "train/loss", "train/grad_norm", "progress/tokens")) for one in (run, whole))
    assert np.abs(found / expected - 1).max() < 1e-11
    assert largest_error(state(run), state(whole)) < 1e-11


@pytest.mark.catalogue(13)
@pytest.mark.timeout(900)  # three commands, of ten seconds each where nobody else computes
def test_commands_with_fewer_and_more_processes_train_the_same_to_rounding(home):
    """Each but the last ends in a SIGKILL as it begins its second save, and so leaves the steps until its first one. The losses
    tell the order of the data too: other sequences change them by a thousandth and more."""
    run = small_run(home, name="elastic", layout=Layout(precision="fp64", dp=4, zero_stage=3))
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=4))
    (home / "run.toml").write_text(to_toml(run))
    folder = home / run.name
    told = [
        train_in_command(home / "run.toml", "--processes", "4", killed_at="save.start:0:2"),
        train_in_command(folder, "--elastic", "--processes", "2", killed_at="save.start:0:2"),
        train_in_command(folder, "--elastic", "--processes", "4"),
    ]
    assert [code for code, _ in told] == [1, 1, 0], told
    lines = [[line for line in text.splitlines() if line.startswith("elastic: ")] for _, text in told]
    assert lines == [[], [f"elastic: 2 processes instead of 4: dp 2, {OTHER_AXES}"],
                     [f"elastic: 4 processes instead of 2: dp 4, {OTHER_AXES}"]]  # fmt: skip
    starts = [row for row in map(json.loads, (folder / "events.jsonl").read_text().splitlines()) if row["event"] == "start"]
    assert [(row["step"], row["world"]) for row in starts] == [(0, 4), (4, 2), (8, 4)]
    whole = small_run(home, name="whole", layout=Layout(precision="fp64", micro_batch_size=2))
    train_here(whole)
    keys = ("step", "progress/tokens", "train/lr")
    assert rows(run, *keys) == rows(whole, *keys)
    found, expected = (np.array(rows(one, "train/loss", "train/grad_norm")) for one in (run, whole))
    assert np.abs(found / expected - 1).max() < 1e-11
    assert largest_error(state(run), state(whole)) < 1e-11


def train_in_command(run: Path, *words: str, killed_at: str | None = None) -> tuple[int, str]:
    """`ultrascale train` in a process of its own, without restarts: its exit code, and what it said."""
    command = [sys.executable, "-m", "ultrascale", "train", str(run), "--max-restarts", "0", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({VARIABLE: killed_at} if killed_at is not None else {})
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with ended_after(process):
        text, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, text


def test_a_layout_that_fits_stays_and_others_have_its_batch_and_precision(tmp_path):
    run = small_run(tmp_path, layout=Layout(dp=4, zero_stage=3, precision="bf16"))
    assert elastic_layout(run, 4) == run.layout
    for world in (1, 2, 8):
        layout = elastic_layout(run, world)
        assert layout.world_size == world and layout.precision == "bf16"
        assert all(stage.sequences_per_batch % (layout.dp * layout.micro_batch_size) == 0 for stage in run.batch.ramp)


def test_what_results_depend_on_stays_the_run_s(tmp_path):
    """An fp8 run went on with other scales and no blocks in bf16, and was planned with AdamW's moments whatever it had."""
    kept = {"precision": "fp8", "fp8_scaling": "delayed", "fp8_keep_blocks": 1, "attention": "sdpa", "reduce_dtype": "bf16"}
    layout = Layout(dp=8, **kept)  # type: ignore[arg-type]
    run = replace(small_run(tmp_path, layout=layout), cluster="8xh100")
    for world in (2, 4):
        found = elastic_layout(run, world)
        assert {name: getattr(found, name) for name in kept} == kept


def test_where_rates_are_known_the_fastest_is_chosen(tmp_path):
    run = replace(small_run(tmp_path, layout=Layout(dp=8, tp=2, precision="bf16")), cluster="16xh100")
    layout = elastic_layout(run, 4)
    assert (layout.world_size, layout.tp, layout.precision) == (4, 1, "bf16")


def test_machines_that_are_named_as_nodes_have_as_many_ranks_as_are_asked_for(tmp_path):
    run = replace(small_run(tmp_path, layout=Layout(dp=8, precision="bf16")), cluster="1xaws-p5")
    assert elastic_layout(run, 4).world_size == 4


def test_no_process_at_all_is_a_mistake(home, capsys):
    file = home / "run.toml"
    file.write_text(to_toml(small_run(home)))
    assert main(["train", str(file), "--elastic", "--processes", "0"]) == 2
    assert "must be at least 1, is 0" in capsys.readouterr().err


def test_where_nothing_fits_the_number_of_ranks_is_named(tmp_path):
    with pytest.raises(SpecError, match="no layout of this run for 7,919 ranks"):
        elastic_layout(small_run(tmp_path), 7919)


def test_the_runtime_of_a_pipeline_is_not_for_the_planner_to_choose(tmp_path):
    run = small_run(tmp_path, layout=Layout(dp=2, pp=2, pipeline_runtime="torch"))
    assert {elastic_layout(run, world).pipeline_runtime for world in (2, 4, 8)} == {"torch"}
    alone = replace(run, layout=Layout(pipeline_runtime="torch"))
    assert any("layout.pipeline_runtime = torch has no effect (layout.pp = 1)" in note for note in run_notes(alone))
