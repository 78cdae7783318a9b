"""The scripts that wait for a GPU run to their end at toy sizes, need nothing a bare machine lacks, and lose no row."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ultrascale.catalogue.models.model_presets import preset

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))
import claims  # noqa: E402  # pyright: ignore[reportMissingImports]
import everything  # noqa: E402  # pyright: ignore[reportMissingImports]
import step_speed  # noqa: E402  # pyright: ignore[reportMissingImports]


@pytest.fixture
def bare(tmp_path) -> dict[str, str]:
    """An environment in which neither a script nor its children find what only the command line needs."""
    for name in ("tyro", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})")
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{FOLDER.parents[1] / 'src'}"}


def run_toy(script: str, environment: dict[str, str], *words: str) -> str:
    """Output of a script at toy size."""
    command = [sys.executable, str(FOLDER / script), "--toy", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_contestants_take_turns_and_one_that_fails_is_a_row(tmp_path, bare):
    output = tmp_path / "record.json"
    told = run_toy(
        "step_speed.py", bare, "--shapes", "1b", "--only", "ours", "plain", "liger", "--steps", "2", "--output", str(output)
    )
    record = json.loads(output.read_text())
    rows = {row["contestant"]: row for row in record["rows"]}
    assert set(rows) == {"ours", "plain", "liger"}
    for name in ("ours", "plain"):
        row = rows[name]
        assert row["tokens_per_second"] > 0 and 0 < row["mfu_causal"] < row["mfu_full"]
        assert 5.5 < row["loss"] < 7.5, "random tokens of 512 ids: the loss is that of guessing, ln 512 = 6.2"
    assert len(rows["ours"]["rounds_median_seconds"]) == 2
    assert rows["ours"]["planned_peak_bytes"] > 0
    assert "failed" in rows["liger"] or rows["liger"]["tokens_per_second"] > 0
    assert told.count("\n| 1b |") == 3
    assert "left out: compiling" in told


def test_all_that_waits_for_a_gpu_is_one_command_and_a_part_that_fails_costs_the_others_nothing(tmp_path, monkeypatch, capsys):
    words = ["--name", "toy", "--results", str(tmp_path), "--toy", "--commit", "abc"]
    failing = everything.Part(("-c", "import time; print('begun', flush=True); time.sleep(60)"), 5.0, ())
    monkeypatch.setitem(everything.PARTS, "primer", failing)
    assert everything.main([*words, "--only", "primer", "primitives"]) == 1
    told = capsys.readouterr().out
    assert "primer: was stopped after 5 s" in told and "begun" in told and "primitives: done" in told
    assert json.loads((tmp_path / "toy" / "primitives.json").read_text())["rows"]
    assert json.loads((tmp_path / "toy" / "place.json").read_text())["commit"] == "abc"


def test_parts_share_the_time_of_one_call(tmp_path, monkeypatch, capsys):
    for name, seconds in (("primer", 60.0), ("kernels", 60.0)):
        monkeypatch.setitem(everything.PARTS, name, everything.Part(("-c", "import time; time.sleep(60)"), seconds, ()))
    words = ["--name", "toy", "--results", str(tmp_path), "--commit", "abc", "--within", "3"]
    assert everything.main([*words, "--only", "primer", "kernels"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"primer: was stopped after [1-3] s", told)  # nvidia-smi takes of the time that parts share
    assert "kernels: no time was left" in told


def test_what_is_claimed_is_run_first():
    arguments = argparse.Namespace(shapes=["1b", "3b", "8b"], only=None, toy=True, steps=1)
    rows = [(row.case.contestant, row.shape) for row in step_speed.rows_of(arguments, step_speed.torch.device("cpu"))]
    assert len(rows) == len(set(rows)) == 3 * 4 + len(step_speed.MORE), "fp8 is for devices that have it"
    assert rows[:3] == [("ours", "8b"), ("ours", "1b"), ("ours", "3b")]
    assert {name for name, _ in rows[3:6]} == {"plain"} and {name for name, _ in rows[6:9]} == {"transformers"}
    assert rows[12:] == [(name, "1b") for name in step_speed.MORE]


def test_the_command_for_all_runs_every_script_and_every_test_that_needs_a_gpu():
    words = [one for part in everything.PARTS.values() for one in part.words]
    scripts = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text()} - {"everything.py"}
    assert scripts - {Path(one).name for one in words} == {"step_contestants.py"}, "which step_speed.py starts"
    tests, word = FOLDER.parents[1] / "tests", "gpu"
    marked = {
        path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py") if f"pytest.mark.{word}" in path.read_text()
    }
    assert marked == {one.split("/")[1] for one in words if one.startswith("tests/")}
    left_out = {one.partition("=")[2] for one in words if one.startswith("--ignore=")}
    assert left_out and left_out <= set(words), "what one part of the tests leaves out is another's"


def test_packages_that_are_missing_are_told_with_what_they_cost(monkeypatch, capsys):
    monkeypatch.setitem(everything.OPTIONAL, "none_such", "no others beside us")
    monkeypatch.setitem(everything.PARTS, "tests", everything.Part((), 1, (), ("pytest", "nor_such")))
    everything.say_what_is_missing(["tests"])
    told = [line.partition(". ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in told if line.partition(" ")[0] not in ("triton", "transformers", "liger_kernel")] == [
        "none_such is not installed: no others beside us", "nor_such is not installed: tests cannot run",
    ]  # fmt: skip


def test_the_primitives_run(tmp_path, bare):
    output = tmp_path / "record.json"
    run_toy("primitives.py", bare, "--output", str(output))
    kinds = [row["kind"] for row in json.loads(output.read_text())["rows"]]
    assert kinds == ["product", "input gradient", "weight gradient", "attention", "attention backward", "copy", "add"]


def test_every_kernel_is_held_to_the_same_in_fp64_and_what_a_cpu_leaves_out_is_said(tmp_path, bare):
    pytest.importorskip("triton")
    output = tmp_path / "record.json"
    command = [sys.executable, str(FOLDER / "kernel_speed.py"), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=bare, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    forms: dict[str, list[str]] = {}
    for row in json.loads(output.read_text())["rows"]:
        assert not row["failed"] and row["distance"] < 1e-6, row
        forms.setdefault(row["kernel"], []).append(row["form"])
    of_torch_and_triton = ("norm", "norm of a sum", "rotary", "loss", "adamw-bf16", "adamw-8bit")
    assert {name: forms[name] for name in of_torch_and_triton} == {name: ["torch", "triton"] for name in of_torch_and_triton}
    assert forms["swiglu"] == ["torch", "ours", "triton"] and forms["experts"] == ["torch", "loop"]
    assert "Left out: times" in done.stdout


def test_claims_are_told_one_by_one_and_what_was_not_measured_too():
    def row(shape: str, contestant: str, speed: float, mfu: float = 0.61) -> dict:
        return {"shape": shape, "contestant": contestant, "tokens_per_second": speed, "mfu_causal": mfu, "mfu_full": mfu + 0.1}

    rows = [
        row("8b", "ours", 100.0), row("1b", "ours", 50.0, 0.59), row("8b", "plain", 101.0), row("1b", "plain", 49.0),
        {"shape": "8b", "contestant": "liger", "failed": "x"}, row("8b", "ours, fp8", 125.0),
        {"shape": "3b", "contestant": "ours", "failed": "x"},
    ]  # fmt: skip
    assert [line[:12].strip() + " " + line[14:] for line in claims.step_claims(rows)] == [
        "holds 8b: MFU 61.0% causal, 71.0% full, of 60%",
        "FAILS 8b: 0.99x plain",
        "not measured 8b: faster than liger",
        "FAILS 1b: MFU 59.0% causal, 69.0% full, of 60%",
        "holds 1b: 1.02x plain",
        "not measured 3b: MFU, faster than each peer",
        "holds 8b: fp8 1.25x bf16, of 1.25x",
    ]
    times = [
        ("norm", "torch", 1.0, 0.5),
        ("norm", "triton", 1.2, 0.4),
        ("swiglu", "triton", 1.0, 0.86),
        ("loss", "torch", None, None),
    ]
    kernels = [dict(zip(("kernel", "form", "seconds", "share"), one, strict=True)) for one in times]
    told = list(claims.kernel_claims(kernels, {"unfused, D = 2048": 100, "ours, D = 2048": 15}))
    assert [line[:5] for line in told] == ["FAILS", "holds", "not m", "FAILS"]


def test_gathers_in_fp8_send_half_and_change_no_loss(tmp_path, bare):
    output = tmp_path / "record.json"
    run_toy("gather_speed.py", bare, "--steps", "1", "--output", str(output))
    record = json.loads(output.read_text())
    cast, *rounded = [row["bytes_sent"] for row in record["shards"]]
    assert [2 * one for one in rounded] == [cast, cast]
    assert [(row["scaling"], row["ranks"]) for row in record["steps"]] == [("row", 2)], "it ends where losses differ"


def test_depth_is_cut_only_where_states_do_not_fit():
    assert step_speed.layers_that_fit(preset("llama-3.2-1b"), 80 * 2**30) is None
    assert step_speed.layers_that_fit(preset("llama-3.1-8b"), 141 * 2**30) == 16
    assert step_speed.layers_that_fit(preset("llama-3.1-8b"), 80 * 2**30) == 8


def case_of(name: str) -> step_speed.Row:
    arguments = argparse.Namespace(shapes=["1b"], only=[name], toy=True, steps=1)
    return next(step_speed.rows_of(arguments, step_speed.torch.device("cpu")))


class Full:
    """A process that runs out of memory until its micro-batch is small."""

    def __init__(self, row: step_speed.Row, *unused: object):
        self.row = row

    def play(self, limit_seconds: float) -> dict:
        is_full = self.row.case.micro_batch_size > 1
        return {"failed": "OutOfMemoryError", "out_of_memory": True} if is_full else {"seconds": [0.1]}


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(tmp_path):
    row = case_of("plain")
    step_speed._take(row, {"failed": "x", "out_of_memory": True}, tmp_path, step_speed.time.monotonic() + 100, 10, Full)
    assert (row.case.micro_batch_size, row.case.accumulate, row.seconds) == (1, 16, [0.1])
    assert row.notes == ["out of memory with 4 sequences at once", "out of memory with 2 sequences at once"]


def test_a_contestant_that_hangs_is_ended_and_said_to_be_over_its_time(tmp_path):
    process = step_speed.Process(case_of("plain"), tmp_path, 0)
    assert process.play(0.01) == {"failed": "over its time"}
    assert process.process.poll() is not None


@pytest.mark.skipif(step_speed.torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_what_to_do(capsys):
    with pytest.raises(SystemExit):
        step_speed.parse(["--shapes", "1b"])
    assert "--toy" in capsys.readouterr().err
