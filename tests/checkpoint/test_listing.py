"""`ultrascale checkpoint list` and `verify`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ultrascale import checkpoint
from ultrascale.cli.weights.checkpoint import command
from ultrascale.description.problems import SpecError


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A run with steps 1 and 2; one number of step 2 has changed on disk."""
    for step in (1, 2):
        checkpoint.save(tmp_path / "checkpoints", step, {"w": torch.ones(4, 4), "n": torch.tensor(1)}, {})
    shard = tmp_path / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return tmp_path


def output(capsys, *words: str) -> tuple[int, dict]:
    code = command([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_list_looks_at_sizes_only_and_tells_step_shards_and_tensors(run_folder, capsys):
    code, told = output(capsys, "list", str(run_folder))
    assert (code, told["whole"]) == (0, True)
    newest = told["checkpoints"][0]
    assert (newest["step"], newest["shards"], newest["tensors"]) == (2, 1, 2)
    assert newest["bytes"] == (run_folder / "checkpoints/step-00000002/rank-00000.safetensors").stat().st_size


def test_a_list_needs_no_torch(run_folder):
    code = "import sys; from ultrascale.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, "checkpoint", "list", str(run_folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "complete" in done.stdout and done.stdout.splitlines()[-1] == "0 False"


@pytest.mark.parametrize("verb", ["verify", "generate", "export"])
@pytest.mark.parametrize("spoil", ["manifest.json", "rank-00000.safetensors"])
def test_what_is_missing_or_cut_is_told_before_torch_is_imported(run_folder, verb, spoil):
    for folder in (run_folder / "checkpoints").iterdir():
        (folder / spoil).write_bytes(b"cut")
    code = "import sys; from ultrascale.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["checkpoint", "verify", str(run_folder)] if verb == "verify" else [verb, str(run_folder)]
    words += [str(run_folder / "out")] * (verb == "export")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ("1 False" if verb == "verify" else "2 False"), done.stderr
    told = done.stdout if verb == "verify" else done.stderr
    assert f"step-00000002/{spoil}" in told and "Use another checkpoint." in told


def test_verify_reads_every_byte_without_torch(run_folder):
    code = "import sys; from ultrascale.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = [sys.executable, "-c", code, "checkpoint", "verify", str(run_folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "its bytes have changed" in done.stdout and done.stdout.splitlines()[-1] == "1 False"


@pytest.mark.parametrize("told", [1_700_000_000.5, None, "now", -1, 1e30, True])
def test_a_checkpoint_says_itself_when_it_was_saved_and_else_the_time_of_its_manifest_stands_in(tmp_path, capsys, told):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.ones(4)}, {"saved_at": told} if told is not None else {})
    os.utime(folder / "manifest.json", (1_800_000_000, 1_800_000_000))  # as a copy of it may have
    _, found = output(capsys, "list", str(tmp_path))
    assert found["checkpoints"][0]["saved_at"] == (told if told == 1_700_000_000.5 else 1_800_000_000)
    assert command(["list", str(tmp_path)]) == 0


def test_verify_reads_the_bytes_names_the_shard_and_fails(run_folder, capsys):
    code, told = output(capsys, "verify", str(run_folder / "checkpoints"))
    assert (code, told["whole"]) == (1, False)
    problems = [one["problem"] for one in told["checkpoints"]]
    assert "step-00000002/rank-00000.safetensors: checksum is crc32:" in problems[0]
    assert problems[1] is None


def test_one_checkpoint_can_be_named(run_folder, capsys):
    code, told = output(capsys, "verify", str(run_folder / "checkpoints" / "step-00000001"))
    assert (code, [one["step"] for one in told["checkpoints"]]) == (0, [1])


def test_the_table_shows_what_is_damaged_and_why(run_folder, capsys):
    assert command(["verify", str(run_folder)]) == 1
    text = capsys.readouterr().out
    assert "verified" in text
    assert "damaged" in text
    assert "its bytes have changed since it was saved" in text


def test_a_checkpoint_without_a_readable_manifest_is_listed_as_damaged(run_folder, capsys):
    (run_folder / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    code, told = output(capsys, "list", str(run_folder))
    assert (code, [one["step"] for one in told["checkpoints"]]) == (1, [2, 1])
    assert "manifest.json: missing" in told["checkpoints"][1]["problem"]


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_one_named_checkpoint_without_its_manifest_is_told_to_miss_it(run_folder, capsys, verb):
    folder = run_folder / "checkpoints" / "step-00000001"
    (folder / "manifest.json").unlink()
    code, told = output(capsys, verb, str(folder))
    assert (code, [one["step"] for one in told["checkpoints"]]) == (1, [1])
    assert "step-00000001/manifest.json: missing" in told["checkpoints"][0]["problem"]


def test_a_folder_without_checkpoints_is_told_what_to_give(tmp_path):
    with pytest.raises(SpecError, match=r"has no checkpoints\. Give a run's folder"):
        command(["list", str(tmp_path)])


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as left:
        command(["verify", "--help"])
    assert left.value.code == 0
    assert "ultrascale checkpoint verify out/run" in capsys.readouterr().out.replace("\n", " ")
