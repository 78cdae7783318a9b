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


def test_an_honest_layout_is_proven_and_told_in_one_table(run_file, capsys):
    assert check(run_file, "--layout.micro-batch-size", "2") == 0
    told = capsys.readouterr().out
    assert "dp 2 zero 3 x 3 micro-batches, tied" in told and "2 of 2 cases compute what one process computes." in told
    assert "DIFFERS" not in told


def test_a_model_too_large_for_a_laptop_is_made_small_and_that_is_said(run_file, capsys):
    assert check(run_file, "--model.preset", "llama-3-8b", "--batch.sequence-length", "8192") == 0
    assert "llama-3-8b is proven on the same kind of model made small: 3 layers, hidden 48." in capsys.readouterr().out


def test_verdicts_are_json_and_name_every_stage_and_tie_when_asked(run_file, capsys, monkeypatch):
    assert check(run_file, "--json") == 0
    verdicts = json.loads(capsys.readouterr().out)
    assert [verdict["holds"] for verdict in verdicts] == [True] * 2
    assert max(d["error"] for verdict in verdicts for d in verdict["worst"].values()) < 1e-11
    todo: list[Case] = []
    monkeypatch.setattr(prove, "prove_all", lambda cases, steps: [todo.extend(cases), []][1])  # `tests/exact` proves them
    assert check(run_file, "--every-stage", "--json") == 0
    assert {(c.run.layout.zero_stage, c.run.model.tie_word_embeddings) for c in todo} == {
        (z, t) for z in range(4) for t in (0, 1)
    }


def test_every_planted_fault_is_seen_and_the_first_parameters_named(run_file, capsys):
    assert check(run_file, "--plant", "all") == 0
    told = capsys.readouterr().out
    assert "8 of 8 planted faults were seen." in told and "MISSED" not in told
    assert "counted-twice: dp 2 zero 3 x 1 micro-batch, tied: step 0: gradient of embed_tokens.weight differs by 1.0" in told


def test_a_fault_that_is_missed_and_a_layout_that_differs_fail(run_file, capsys, monkeypatch):
    monkeypatch.setitem(faults._PLANT, "shifted-batch", lambda trainer: lambda: None)
    assert check(run_file, "--plant", "shifted-batch") == 1
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.setattr(prove, "TOLERANCE", -1.0)
    assert check(run_file) == 1
    told = capsys.readouterr().out
    assert "DIFFERS" in told and "0 of 2 cases" in told and "gradient of embed_tokens.weight differs by" in told


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere.toml"], "there is no such file"),
        (["{run}", "--processes", "0"], "layout.dp"),
        (["{run}", "--processes", "3"], "must be a multiple of layout.dp x layout.micro_batch_size = 3, is 4"),
        (["{run}", "--laoyut.dp", "2"], "Did you mean layout.dp?"),
        (["{run}", "--steps", "0"], "must be at least 1, is 0"),
        (["{run}", "--plant", "nothing"], "knows no fault 'nothing'"),
        (["{run}", "--processes", "1", "--layout.zero-stage", "0", "--plant", "all"], "Add --processes 2"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(run_file, capsys, words, message):
    assert main(["check", *(word.format(run=run_file) for word in words)]) == 2
    assert message in capsys.readouterr().err
