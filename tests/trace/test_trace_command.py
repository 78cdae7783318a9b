"""`ultrascale trace` as a user types it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ultrascale.api import trace as verb
from ultrascale.cli.main import main

RUN = """
cluster = "16xh100"

[model]
preset = "tiny-llama"

[layout]
dp = 4
tp = 2
pp = 2
precision = "bf16"

[batch]
sequence_length = 128
sequences_per_batch = 16
"""


@pytest.fixture
def run(tmp_path: Path) -> str:
    (tmp_path / "run.toml").write_text(RUN)
    return str(tmp_path / "run.toml")


def test_a_rank_is_told_in_tables(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run, "--rank", "9"]) == 0
    told = capsys.readouterr().out
    assert "rank 9 of 16, as if on cuda: step 2, 4 micro-batches" in told
    for word in (
        "memory at the peak",
        "messages of a step",
        "issued by",
        "FLOPs of a step",
        "parallel/tensor/tensor_traffic.py:",
    ):
        assert word in told
    assert "actions  F0@1 B0@1 F1@1 B1@1" in told


def test_what_the_flops_of_attention_count_is_said_where_there_are_any(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are 2.3 times those of the MFU: a reader who adds them up would find another number than the plan's."""
    for rank, blocks in ((0, 2), (9, 0)):
        assert main(["trace", run, "--rank", str(rank)]) == 0
        told = capsys.readouterr().out
        assert ("whole squares of scores" in told) == bool(blocks) and "recompute  backward" in told


def test_the_same_for_machines_and_in_files(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("m.png", "m.svg", "t.json", "m.pickle")]
    assert main(["trace", run, "--json", "--explain-oom", "--out", *files]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["world"] == 16 and told["peak_bytes"] < told["reserved_bytes"]
    assert told["comparison"]["memory"][-1]["name"] == "peak"
    assert {"line", "axis", "kind", "num_bytes"} <= told["messages"][0].keys()
    assert {(sent["axis"], sent["tier"]) for sent in told["messages"]} >= {("tp", "node"), ("pp", "network")}
    highest = max(sum(point["bytes"].values()) for point in told["timeline"] if point["step"] == told["step"] == 2)
    assert highest == told["peak_bytes"] and {point["step"] for point in told["timeline"]} >= {1, 2}
    assert told["actions"][0] == "F0@0" and told["alive_at_peak"] and 0 < len(told["edits"]) <= 3
    assert all(Path(file).stat().st_size > 1000 for file in files)


def test_every_stage_is_told_in_a_line(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run, "--all-stages", "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)
    assert [(one["pp"], one["rank"]) for one in stages] == [(0, 0), (1, 8)]
    assert all(one["traced_bytes"] < one["reserved_bytes"] for one in stages)


def test_a_world_shares_the_batch_over_data_parallel_ranks(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", run, "--world", "8", "--cluster", "8xh100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batches"] == 8


@pytest.mark.parametrize(
    "words, told",
    [
        (["--rank", "16"], "must be from 0 to 15"),
        (["--out", "memory.gif"], "must end in one of .png, .svg, .json, .pickle"),
        (["--out", "nowhere/memory.png"], "there is no folder nowhere"),
        (["--all-stages", "--explain-oom"], "does nothing with --explain-oom"),
        (["--all-stages", "--rank", "0"], "does nothing with --rank"),
        (["--all-stages", "--steps", "3"], "does nothing with --steps"),
        (["--steps", "0"], "must be at least 1"),
        (["--layout.tp", "3"], "must divide"),
        (["--world", "9"], "--world\n    9 processes are not a multiple of tp = 2 x pp = 2"),
        (["--layout.precision", "mxfp8"], "mxfp8"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    run: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", run, *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("words, needed", [([], "513 MiB"), (["--all-stages"], "1.00 GiB")])
def test_too_little_memory_is_said_before_it_is_used(
    run: str, words: list[str], needed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "free_bytes", lambda: 2**20)
    monkeypatch.setattr(verb, "usable_cores", lambda: 2)
    assert main(["trace", run, *words]) == 2
    assert f"would take about {needed} of this machine's memory, of which 1 MiB are free" in capsys.readouterr().err


def test_a_script_without_a_guard_that_asks_for_every_stage_runs_once() -> None:
    """Its processes imported it anew, which for a script read from stdin is a broken pool."""
    script = "import ultrascale as us\nprint('ran')\n"
    script += "print(len(us.trace('runs/tiny-llama-cpu.toml', layout={'pp': 2}, all_stages=True).rows()))\n"
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=400)
    assert (done.stdout, done.returncode) == ("ran\n2\n", 0), done.stderr


@pytest.mark.parametrize("name", ["m.png", "m.svg", "t.json", "m.pickle"])
def test_a_file_without_room_is_named_and_nothing_of_it_stays(run: str, name: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir()
    assert main(["trace", run, "--out", str(file)]) == 0  # modules are compiled without the limit
    file.unlink()
    capsys.readouterr()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a full disk: a write fails after its first bytes
    try:
        code = main(["trace", run, "--out", str(file)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and name in capsys.readouterr().err
    assert not any(file.parent.iterdir())
