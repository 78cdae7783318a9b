"""What `ultrascale plan` is asked for is done, or refused in a sentence; nothing is dropped without a word."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ultrascale.cli.main import main

ON_64 = ["plan", "--model", "llama-3-8b", "--gpus", "64xh100", "--seq-len", "8192", "--top", "1"]
ON_CPU = ["plan", "--model", "tiny-llama-4m", "--gpus", "2xcpu", "--seq-len", "128"]
TOO_LARGE = ["plan", "--model", "llama-3.1-405b", "--gpus", "8xh100", "--top", "1"]


@pytest.fixture
def run_file(tmp_path) -> Path:
    file = tmp_path / "run.toml"
    layout = '[layout]\ndp = 8\nzero_stage = 2\nprecision = "bf16"\n'
    file.write_text(f'cluster = "8xh100"\n[model]\npreset = "llama-3-8b"\n[batch]\nsequences_per_batch = 64\n{layout}')
    return file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sequences-per-batch", "512", "--tokens-per-batch", "4M"], "say the same thing twice"),
        (["--print-flags", "--json"], "both want the whole output"),
        (["--runnable", "--stack", "megatron"], "is about `ultrascale train`"),
        (["--layout.reduce-dtype", "fp32,bf16"], "are 2 values"),
        (["--tokens", "0"], "must be more than 0"),
        (["--tokens", "xyz", "--print-flags"], "Write 300B or 1T"),
        (["--zero-stage", "5"], "layout.zero_stage"),
        (["--precision", "fp8", "--gpus", "64xa100"], "has no fp8"),
        (["--precision", "fp9"], "layout.precision"),
        (["--cluster", "8xh100"], "names the machines, and so does --gpus"),
        (["--save", ""], "is empty: a path of no letters"),
        (["--save", "/nowhere/run.toml"], "the folder /nowhere is not there"),
        (["--svg", "/nowhere/a.svg", "--perfetto", "/nowhere/a.json"], "2 mistakes"),
        (["--micro-batch-size", "5000", "--tokens-per-batch", "4M"], "5000 is more than the batch of 512 sequences"),
        (["--layout.dp", "7"], "dp = 7 does not divide 64 GPUs"),
        (["--optimizer", "sgd"], "no optimizer called 'sgd'"),
        (["--expert-imbalance", "1.5"], "the model has no experts"),
        (["--expert-imbalance", "0.5"], "at least 1, is 0.5"),
        (["--expert-imbalance", "nan"], "at least 1, is nan"),
        (["--checkpoint-minutes", "30"], "nothing says how fast the storage is"),
        (["--checkpoint-minutes", "0", "--storage-gbytes", "inf"], "2 mistakes"),
    ],
)
def test_flags_that_cannot_both_hold_are_refused(capsys, words: list[str], said: str) -> None:
    gpus = ["--gpus", "64xh100"] if "--gpus" not in words else []
    assert main(["plan", "--model", "llama-3-8b", "--seq-len", "8192", *gpus, *words]) == 2
    told = capsys.readouterr().err
    assert said in told and "->" in told


@pytest.mark.parametrize("words", [["--explain"], ["--stack", "megatron"], ["--tp", "2"], ["--top", "3"], ["--tokens", "1B"]])
def test_what_needs_step_times_is_refused_on_a_machine_whose_speed_nobody_lists(capsys, words: list[str]) -> None:
    assert main([*ON_CPU, *words]) == 2
    assert "measured at run time" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--explain"], ["--top", "3"], ["--runnable"]])
def test_a_run_file_is_not_searched(capsys, run_file: Path, words: list[str]) -> None:
    assert main(["plan", str(run_file), *words]) == 2
    assert "a run's file has one layout" in capsys.readouterr().err


def test_a_run_that_its_trainer_cannot_be_asked_for_is_refused_with_what_to_change(capsys, run_file: Path) -> None:
    assert main(["plan", str(run_file), "--stack", "megatron"]) == 2
    told = capsys.readouterr().err
    assert "megatron has ZeRO stages 0, 1" in told and "--layout.zero-stage" in told
    assert main(["plan", str(run_file), "--stack", "megatron", "--zero-stage", "1"]) in (0, 1)
    assert "--stack megatron --print-flags" in capsys.readouterr().out


def test_what_follows_is_something_that_can_be_done(capsys, tmp_path) -> None:
    file = tmp_path / "run.toml"
    pieces = ["--pp", "2", "--schedule", "dualpipe", "--layout.mlp-chunks", "2"]  # which our trainer does not run
    assert main([*ON_64, *pieces, "--save", str(file)]) == 0
    said = capsys.readouterr().out.partition("next  ")[2]
    assert "check" not in said and f"ultrascale plan {file} --perfetto" in said
    assert main(["plan", str(file)]) == 0
    assert "ultrascale check" not in capsys.readouterr().out


def test_what_the_search_does_not_choose_is_kept(tmp_path) -> None:
    file = tmp_path / "run.toml"
    assert main([*ON_64, "--pp", "2", "--layout.pipeline_runtime", "torch", "--save", str(file)]) == 0
    assert 'pipeline_runtime = "torch"' in file.read_text()


def test_where_nothing_fits_what_was_not_written_is_told(capsys, tmp_path) -> None:
    file = tmp_path / "run.toml"
    assert main([*TOO_LARGE, "--save", str(file)]) == 1
    assert f"not written: {file}" in capsys.readouterr().err and not file.exists()
    assert main([*TOO_LARGE, "--print-flags"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("[layout]") and "does not fit" in captured.err


def test_several_stages_and_ways_to_recompute_are_searched(capsys) -> None:
    assert main([*ON_64[:-1], "100", "--zero-stage", "1,3", "--recompute", "none,selective", "--json"]) == 0
    layouts = [one["layout"] for one in json.loads(capsys.readouterr().out)["search"]["ranked"]]
    assert {one["zero_stage"] for one in layouts} == {1, 3} and {one["recompute"] for one in layouts} <= {"none", "selective"}


def test_a_batch_is_brought_to_what_the_ranks_of_dp_can_share_in_the_layout_that_was_asked_for(capsys) -> None:
    assert main([*ON_64, "--tokens-per-batch", "63M", "--seq-len", "8192", "--tp", "8", "--pp", "2"]) == 0
    assert "7,692 sequences, 63,012,864 tokens" in capsys.readouterr().out


def test_a_batch_that_was_brought_to_whole_sequences_is_noted(capsys) -> None:
    assert main([*ON_64, "--tokens-per-batch", "4M"]) == 0
    assert "global batch: 512 sequences, 4,194,304 tokens; 4M rounded" in capsys.readouterr().out
    assert main([*ON_64, "--tokens-per-batch", "4Mi"]) == 0
    assert "rounded" not in capsys.readouterr().out


@pytest.mark.parametrize(("stack", "wanted"), [("eager", "--explain"), ("transformers", "--print-flags")])
def test_the_next_command_prints_settings_only_of_a_trainer_that_has_them(capsys, stack, wanted):
    words = ["--model", "llama-3-8b", "--gpus", "8xh100", "--stack", stack]
    assert main(["plan", *words, "--brief"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next")]
    assert line.endswith(wanted)
    assert main(shlex.split(line.removeprefix("next").strip())[1:]) == 0


@pytest.mark.parametrize("name", ["accelerate", "trl", "axolotl"])
def test_a_program_that_a_stack_stands_for_is_named(capsys, name):
    assert main(["plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--stack", name]) == 2
    assert "transformers stands for it" in capsys.readouterr().err
