"""The command line with a run in a bucket: two ranks, a machine whose disk is empty, lists, exports, refusals."""

import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from s3_server import SECRET, environment, reached_at
from train.small_runs import make_corpus, same, small_run, train_here, train_ranks

from ultrascale.checkpoint import load_full, newest_valid
from ultrascale.cli.main import main
from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run
from ultrascale.storage import open_store


def ultrascale(server: str, folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder` with the server's address in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return subprocess.run(
        [sys.executable, "-m", "ultrascale", *words], cwd=folder, capture_output=True, text=True, timeout=600,
        env=kept | environment(server) | {"OMP_NUM_THREADS": "1"} | more,
    )  # fmt: skip


def write_run(folder: Path, **changes: Any) -> Run:
    make_corpus(folder / "tokens")
    run = replace(small_run(folder), folder="out", **changes)
    (folder / "run.toml").write_text(to_toml(run))
    return run


def final_state(folder: Path) -> dict:
    newest = newest_valid(folder / "small/checkpoints")
    assert newest is not None
    return load_full(newest)[0]


TRAIN = ("train", "run.toml", "--checkpoint.every-steps", "3")


@pytest.mark.timeout(900)  # two trainings, each with processes of its own
def test_two_ranks_into_a_bucket_and_on_from_it_elsewhere(server: str, tmp_path: Path):
    """Trained to step 6 here, and on an empty disk to the end: the bits of a run that was not moved."""
    place = f"s3://bucket/{uuid.uuid4().hex}"
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run = write_run(here, layout=Layout(dp=2, micro_batch_size=2), optimizer=Optimizer(learning_rate=5e-3, schedule="constant"))
    train_ranks(replace(run, folder=str(here / "straight")))
    first = ultrascale(server, here, *TRAIN, "--checkpoint.store", place, "--steps", "6")
    assert first.returncode == 0, first.stderr
    second = ultrascale(server, there, "train", f"{place}/small", "--steps", "12")
    assert second.returncode == 0, second.stderr + second.stdout
    assert "resumed from" in second.stdout
    assert same(final_state(there / "out"), final_state(here / "straight"))
    for done in (first, second):
        assert SECRET not in done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_what_is_in_a_bucket_is_listed_verified_and_exported(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    place = f"s3://bucket/{uuid.uuid4().hex}"
    make_corpus(tmp_path / "tokens")
    run = small_run(tmp_path, steps=8)
    with reached_at(server):
        train_here(replace(run, checkpoint=replace(run.checkpoint, store=place)))
    listed = json.loads(ultrascale(server, tmp_path, "checkpoint", "list", f"{place}/small", "--json").stdout)
    monkeypatch.chdir(tmp_path)

    def told(code: int, *words: str) -> str:
        capsys.readouterr()
        with reached_at(server):
            assert main([*words]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    assert listed["whole"] and listed["checkpoints"][0]["folder"] == f"{place}/small/checkpoints/step-00000008"
    assert "verified" in told(0, "checkpoint", "verify", f"{place}/small")
    assert f"{place}/exports/a" in told(0, "export", f"{place}/small", f"{place}/exports/a")
    assert "holds something already" in told(2, "export", f"{place}/small", f"{place}/exports/a")
    told(0, "export", f"{place}/small", f"{place}/exports/a", "--overwrite")
    with reached_at(server):
        open_store(f"{place}/exports/b").write("config.json", b'{"model_type": "gpt2", "n_embd": 768}')
    assert "holds another model" in told(2, "export", f"{place}/small", f"{place}/exports/b", "--overwrite")
    told(0, "export", f"{place}/exports/a", "copy")
    told(0, "export", "small", "local")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


REFUSED = {
    "no bucket": ("s3://never-made/runs", {}, "there is no such bucket"),
    "no scheme": ("ftp://x/y", {}, "checkpoint.store"),
    "a commit of the hub": (f"hf://user/repo@{'0' * 40}", {}, "names a commit, which stays as it is"),
    "credentials in the name": ("s3://key:secret@bucket/x", {}, "must hold no credentials"),
    "nothing there": ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "does not answer as it should"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_store_that_cannot_be_used_is_told_before_anything_starts(server: str, tmp_path: Path, name: str):
    store, more, told = REFUSED[name]
    write_run(tmp_path)
    done = ultrascale(server, tmp_path, *TRAIN, "--checkpoint.store", store, **more)
    assert done.returncode in (1, 2) and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [("hf://ada", "out"), ("s3://b/x", "s3://key@b/x"), ("s3://b/x", "hf://datasets/a/b")])
def test_a_place_that_names_no_store_is_a_wrong_argument(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *words]) == 2
    told = capsys.readouterr().err
    assert "invalid arguments:\n" in told and f"  {words[words[0] == 's3://b/x']}\n" in told


def test_a_run_folder_in_a_bucket_is_refused_with_what_to_do(server: str, tmp_path: Path):
    write_run(tmp_path)
    done = ultrascale(server, tmp_path, "train", "run.toml", "--folder", "s3://bucket/runs")
    assert done.returncode == 2 and "[checkpoint] store" in done.stderr


def test_a_place_without_a_run_is_told(server: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for words in (
        ("train", "s3://bucket/none"),
        ("checkpoint", "list", "s3://bucket/none"),
        ("export", "s3://bucket/none", "x"),
    ):
        with reached_at(server):
            code = main([*words])
        told = capsys.readouterr().err
        assert code in (1, 2) and "s3://bucket/none" in told and "Traceback" not in told, told
