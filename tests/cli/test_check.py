"""`ultrascale check`: what it proves, what it says, how it ends."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from api.validator import mistakes
from write_schemas import schema_of

from ultrascale.check import matrix, prove
from ultrascale.check.faults.all_faults import PLANTS
from ultrascale.check.faults.table import FAULTS
from ultrascale.check.prove import Case
from ultrascale.cli.check import _ProofProgress
from ultrascale.cli.main import main

CELLS = matrix.cells()
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
    told = capsys.readouterr().out
    assert "llama-3-8b is checked on a scaled-down model of the same architecture: 3 layers, hidden 48." in told


def test_verdicts_of_the_runs_own_layout_are_json(run_file, capsys):
    assert check(run_file, "--own-layout", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    names = ["dp 2 zero 3 x 1 micro-batch, tied", "dp 2 zero 3 x 3 micro-batches, tied"]
    assert [(verdict["case"], verdict["holds"]) for verdict in found] == [(name, True) for name in names]
    assert max(d["error"] for verdict in found for d in verdict["worst"].values()) < 1e-11
    assert all("anything below float64 (bf16, fp8)" in verdict["not_seen"] for verdict in found)


def test_a_proof_says_what_it_does_not_see_and_that_windows_are_cut(run_file, capsys):
    words = (
        "--own-layout",
        "--layout.dp",
        "1",
        "--layout.cp",
        "2",
        "--model.preset",
        "tiny-mistral",
        "--layout.zero-stage",
        "0",
    )
    assert check(run_file, *words, "--batch.sequence-length", "256") == 0
    told = capsys.readouterr().out
    assert "Its windows of 64 tokens are proven as windows of 14, which act in sequences of 61." in told
    assert "made small" not in told and "Not seen: what the reference shares with the trainer: the decoder's formulas" in told


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


@pytest.fixture
def todo(monkeypatch) -> list[Case]:
    """The cases that would be proven; `tests/exact` proves them."""
    asked: list[Case] = []
    monkeypatch.setattr(prove, "prove_all", lambda cases, **options: [asked.extend(cases), []][1])
    return asked


def test_a_run_too_large_for_a_laptop_is_proven_with_four_processes_in_groups_and_that_is_said(run_file, capsys, todo):
    words = ("--layout.dp", "64", "--layout.dp-shard", "8", "--batch.sequences-per-batch", "64", "--own-layout", "--json")
    assert check(run_file, *words) == 0
    assert "64 processes are proven with 4.\nIts groups of 8 ranks with one copy of the state become groups of 2." in (
        capsys.readouterr().err
    )
    assert {(case.run.layout.dp, case.run.layout.dp_shard) for case in todo} == {(4, 2)}


def test_every_fault_that_a_run_can_have_is_seen_and_the_first_parameters_named(run_file, capsys):
    assert check(run_file, "--plant", "counted-twice", "--own-layout") == 0
    told = capsys.readouterr().out
    assert "2 of 2 planted faults were seen." in told and "MISSED" not in told
    assert "counted-twice: dp 2 zero 3 x 1 micro-batch, tied: step 0: gradient of embed_tokens.weight differs by 1.0" in told


def test_all_faults_that_a_run_can_have_are_planted_and_no_others(run_file, capsys, todo):
    check(run_file, "--plant", "all", "--own-layout", "--json")
    planted = {case.fault for case in todo}
    assert {"missing-reduce", "missing-scatter", "accumulation-reset", "stale-copy"} < planted
    assert not any(str(name).startswith(("tp-", "cp-", "pp-", "expert-")) for name in planted)
    assert all(FAULTS[str(case.fault)].fits(case.run) for case in todo)


def test_verdicts_are_counted_where_a_spawned_process_forks_the_ranks(run_file, capfd, forks_here, monkeypatch):
    forks_here(False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert check(run_file, "--own-layout") == 0
    assert "2 of 2 cases after" in capfd.readouterr().err


def test_a_fault_that_is_missed_and_a_layout_that_differs_fail(run_file, capsys, monkeypatch):
    monkeypatch.setitem(PLANTS, "shifted-batch", lambda trainer: nullcontext())
    assert check(run_file, "--plant", "shifted-batch", "--own-layout") == 1
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.setattr(prove, "TOLERANCE", -1.0)
    assert check(run_file, "--own-layout") == 1
    told = capsys.readouterr().out
    assert "DIFFERS" in told and "0 of 2 cases" in told and "gradient of embed_tokens.weight differs by" in told


def test_a_fault_without_a_run_is_planted_where_it_can_be_seen_and_the_list_names_all(capsys):
    assert main(["check", "--plant", "pp-tied"]) == 0
    assert "1 of 1 planted faults were seen." in capsys.readouterr().out
    assert main(["check", "--plant", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FAULTS)


AXES = ("--layout.tp", "8", "--layout.pp", "4", "--layout.dp", "16", "--batch.sequences-per-batch", "64",
        "--model.preset", "llama-3-8b")  # fmt: skip


def test_the_list_of_faults_is_json_where_json_is_asked_for(capsys):
    assert main(["check", "--plant", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "ultrascale/faults/1" and [one["name"] for one in told["faults"]] == list(FAULTS)
    assert mistakes(told, schema_of("faults")) == []


def test_while_a_proof_runs_its_phase_is_told():
    counted = _ProofProgress(12)
    assert counted.words() == "processes start for the first of 12 cases"
    counted.done.value = 3
    assert counted.words() == "3 of 12 cases compared"


def test_a_run_of_several_axes_is_proven_with_all_of_them_and_one_that_does_not_fit_is_named(run_file, capsys, todo):
    assert check(run_file, *AXES, "--own-layout", "--json") == 0
    assert capsys.readouterr().err.splitlines()[0] == "The run's 512 processes are proven with 8."
    assert {(c.run.layout.tp, c.run.layout.pp, c.run.layout.dp, c.run.layout.zero_stage) for c in todo} == {(2, 2, 2, 3)}
    words = [word for word in AXES if word not in ("--layout.dp", "16")]
    assert check(run_file, *words, "--layout.zero-stage", "0", "--processes", "2", "--own-layout", "--json") == 0
    assert "With so few processes tp and dp are not proven: leave --processes out." in capsys.readouterr().err


def test_tensor_and_pipeline_parallelism_are_proven_from_the_command_line(run_file, capsys):
    words = ("--layout.dp", "1", "--layout.tp", "2", "--layout.pp", "2", "--batch.sequence-length", "15", "--own-layout")
    assert check(run_file, *words) == 0
    assert "dp 1 tp 2 pp 2 zero 3 x 3 micro-batches, tied" in capsys.readouterr().out


def test_the_matrix_is_summed_up_and_written_as_a_page_and_what_differs_fails(tmp_path, capsys, monkeypatch):
    cells = [replace(cell, refused="layout.pp is odd") for cell in matrix.cells()[:3]]
    monkeypatch.setattr(matrix, "cells", lambda: cells)
    page = tmp_path / "support.md"
    assert main(["check", "--matrix", "--processes", "2", "--markdown", str(page)]) == 0
    assert "3 combinations: 3 refused" in capsys.readouterr().out and "layout.pp is odd" in page.read_text()
    cell = next(cell for cell in CELLS if cell.run.layout.world_size == 2)
    cells[:] = [replace(cell, run=replace(cell.run, model=replace(cell.run.model, vocab_size=-1)))]  # which ends every rank
    assert main(["check", "--matrix", "--json"]) == 1
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["DIFFERS"]


DEADLOCK = "0F0,0B0\n1B0,1F0\n"
NO_BACKWARD = "0F0\n1F0,1B0\n"


@pytest.mark.parametrize(
    "schedule, message",
    [(DEADLOCK, "rank 1, action 0 (1B0)"), (NO_BACKWARD, "does not pass stage 0 once each way"), ("0F0,huh\n", "huh")],
)
def test_a_schedule_file_that_cannot_be_executed_is_refused_by_rank_and_action(run_file, tmp_path, capsys, schedule, message):
    (tmp_path / "own.csv").write_text(schedule)
    words = ("--layout.dp", "1", "--layout.pp", "2", "--layout.zero-stage", "0", "--layout.schedule", str(tmp_path / "own.csv"))
    assert check(run_file, *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere.toml"], "there is no such file"),
        (["{run}", "--processes", "0"], "must be from 1 to 64, is 0"),
        (["{run}", "--processes", "3", "--layout.dp=4"], "is given beside --layout.dp"),
        (["{run}", "--layout.dp", "3"], "must be a multiple of layout.dp x layout.micro_batch_size = 3, is 4"),
        (["{run}", "--laoyut.dp", "2"], "Did you mean --layout.dp?"),
        (["{run}", "--steps", "0"], "must be at least 1, is 0"),
        (["{run}", "--plant", "nothing"], "knows no fault 'nothing'"),
        (["{run}", "--plant", "tp-copies"], "tp-copies needs tp > 1"),
        (["{run}", "--matrix"], "proves runs of its own"),
        (["{run}", "--markdown", "page.md"], "Add --matrix."),
        ([], "Name a run, give --model and --gpus, or prove all"),
        (["{run}", "--layout.tp", "3"], "must divide model.num_attention_heads"),
        (["{run}", "--layout.ep", "2"], "cuts experts, but the model has none"),
        (["{run}", "--layout.ep", "3", "--model.preset", "tiny-mixtral"], "ep x expert_tp = 3 must divide tp x cp x dp = 2"),
        (["{run}", "--processes", "1", "--layout.zero-stage", "0", "--plant", "all"], "Add --processes 2"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(run_file, capsys, words, message):
    assert main(["check", *(word.format(run=run_file) for word in words)]) == 2
    assert message in capsys.readouterr().err
