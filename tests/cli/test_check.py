"""`ultrascale check`: what it proves, what it says, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultrascale.check import faults, prove
from ultrascale.check.prove import Case
from ultrascale.cli.main import main

RUN = """
device = "cpu"
[model]
preset = "tiny-llama"
[layout]
dp = 2
zero_stage = 3
[batch]
sequence_length = 16
sequences_per_batch = 4
"""


@pytest.fixture
def run_file(tmp_path) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def check(run_file: Path, *words: str) -> int:
    return main(["check", str(run_file), "--steps", "1", *words])


def test_every_stage_accumulation_and_tie_is_proven_and_told_in_one_table(run_file, capsys):
    assert check(run_file, "--layout.micro-batch-size", "2") == 0
    told = capsys.readouterr().out
    assert [f"dp 2 zero {stage} x {n}, {tie}" in told for stage in range(4) for n in ("1 micro-batch", "3 micro-batches")
            for tie in ("tied", "untied")] == [True] * 16  # fmt: skip
    assert "16 of 16 cases compute what one process computes." in told and "DIFFERS" not in told


def test_a_model_too_large_for_a_laptop_is_made_small_and_that_is_said(run_file, capsys):
    assert check(run_file, "--own-layout", "--model.preset", "llama-3-8b", "--batch.sequence-length", "8192") == 0
    assert "llama-3-8b is proven on the same kind of model made small: 3 layers, hidden 48." in capsys.readouterr().out


def test_verdicts_of_the_runs_own_layout_are_json(run_file, capsys):
    assert check(run_file, "--own-layout", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    names = ["dp 2 zero 3 x 1 micro-batch, tied", "dp 2 zero 3 x 3 micro-batches, tied"]
    assert [(verdict["case"], verdict["holds"]) for verdict in found] == [(name, True) for name in names]
    assert max(d["error"] for verdict in found for d in verdict["worst"].values()) < 1e-11


def test_the_number_of_processes_needs_not_divide_the_runs_own_batch(run_file, capsys):
    assert check(run_file, "--processes", "3", "--own-layout") == 0
    told = capsys.readouterr().out
    assert "The run's 2 processes are proven with 3." in told and "dp 3 zero 3 x 3 micro-batches, tied" in told


def test_a_run_of_one_process_is_proven_with_two_and_that_is_said(run_file, capsys):
    alone = ("--layout.dp", "1", "--own-layout", "--json")
    assert check(run_file, *alone) == 0
    told = capsys.readouterr()
    assert told.err.splitlines() == ["The run has one process, which communicates with nobody; it is proven with 2."]
    assert {verdict["case"][:11] for verdict in json.loads(told.out)} == {"dp 2 zero 3"}


def test_one_process_that_is_asked_for_is_told_that_it_proves_no_communication(run_file, capsys):
    assert check(run_file, "--processes", "1", "--own-layout") == 0
    assert "One process communicates with nobody: this proves accumulation alone." in capsys.readouterr().out


def test_a_run_too_large_for_a_laptop_is_proven_with_four_processes_in_groups_and_that_is_said(run_file, capsys, monkeypatch):
    todo: list[Case] = []
    monkeypatch.setattr(prove, "prove_all", lambda cases, steps: [todo.extend(cases), []][1])  # `tests/exact` proves them
    words = ("--layout.dp", "64", "--layout.dp-shard", "8", "--batch.sequences-per-batch", "64", "--own-layout", "--json")
    assert check(run_file, *words) == 0
    assert "64 processes are proven with 4.\nIts groups of 8 ranks with one copy of the state become groups of 2." in (
        capsys.readouterr().err
    )
    assert {(case.run.layout.dp, case.run.layout.dp_shard) for case in todo} == {(4, 2)}


def test_every_planted_fault_is_seen_and_the_first_parameters_named(run_file, capsys):
    assert check(run_file, "--plant", "all", "--own-layout") == 0
    told = capsys.readouterr().out
    assert "8 of 8 planted faults were seen." in told and "MISSED" not in told
    assert "counted-twice: dp 2 zero 3 x 1 micro-batch, tied: step 0: gradient of embed_tokens.weight differs by 1.0" in told


def test_a_fault_that_is_missed_and_a_layout_that_differs_fail(run_file, capsys, monkeypatch):
    monkeypatch.setitem(faults._PLANT, "shifted-batch", lambda trainer: lambda: None)
    assert check(run_file, "--plant", "shifted-batch", "--own-layout") == 1
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.setattr(prove, "TOLERANCE", -1.0)
    assert check(run_file, "--own-layout") == 1
    told = capsys.readouterr().out
    assert "DIFFERS" in told and "0 of 2 cases" in told and "gradient of embed_tokens.weight differs by" in told


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere.toml"], "there is no such file"),
        (["{run}", "--processes", "0"], "must be from 1 to 64, is 0"),
        (["{run}", "--processes", "3", "--layout.dp=4"], "is given beside --layout.dp"),
        (["{run}", "--layout.dp", "3"], "must be a multiple of layout.dp x layout.micro_batch_size = 3, is 4"),
        (["{run}", "--laoyut.dp", "2"], "Did you mean layout.dp?"),
        (["{run}", "--steps", "0"], "must be at least 1, is 0"),
        (["{run}", "--plant", "nothing"], "knows no fault 'nothing'"),
        (["{run}", "--processes", "1", "--layout.zero-stage", "0", "--plant", "all"], "Add --processes 2"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(run_file, capsys, words, message):
    assert main(["check", *(word.format(run=run_file) for word in words)]) == 2
    assert message in capsys.readouterr().err
