"""Exports appear whole, and replace nothing but an earlier export."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from models.families import LLAMA

from ultrascale.description.architecture.weights import weights
from ultrascale.description.problems import SpecError
from ultrascale.models.files.folders import FolderError
from ultrascale.models.files.huggingface import expect_same_model, export_folder

STATE = {weight.name: torch.zeros(weight.shape) for weight in weights(LLAMA)}


def export(folder: Path, **options) -> Path:
    return export_folder(STATE, LLAMA, folder, overwrite=True, **options)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refusal(folder: Path, within: Path, **options) -> str:
    """What is told; nothing under `within` has changed."""
    before = tree(within)
    with pytest.raises(SpecError) as caught:
        export(folder, **options)
    assert tree(within) == before
    return str(caught.value)


def test_an_earlier_export_is_replaced_with_all_its_shards(tmp_path):
    export(tmp_path / "hf", max_shard_bytes=20_000)
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    export(tmp_path / "hf")
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "rank-00000.safetensors"])
def test_a_folder_with_a_file_that_no_export_writes_is_not_replaced(tmp_path, name):
    export(tmp_path / "hf")
    (tmp_path / "hf" / name).write_text("mine")
    assert f"holds what no export writes ({name})" in refusal(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "model.safetensors"])
def test_a_folder_with_folders_in_it_is_not_replaced(tmp_path, name):
    (tmp_path / "hf" / name).mkdir(parents=True)
    (tmp_path / "hf/config.json").write_text("{}")
    assert f"holds what no export writes ({name})" in refusal(tmp_path / "hf", tmp_path)


def test_weights_without_a_config_are_not_taken_for_an_export(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_text("mine")
    assert "holds no config.json" in refusal(tmp_path / "hf", tmp_path)


def test_a_config_without_weights_is_not_taken_for_an_export(tmp_path):
    """One written by hand for a run's model.path was replaced."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    assert "no earlier export" in refusal(tmp_path / "hf", tmp_path)


def test_another_model_is_not_replaced(tmp_path):
    text = (export(tmp_path / "hf") / "config.json").read_text()
    other = json.dumps(json.loads(text) | {"hidden_size": 4096, "model_type": "mistral"})
    with pytest.raises(SpecError, match=r"holds another model \(model_type = mistral, .*hidden_size = 4096"):
        expect_same_model("there", other.encode(), LLAMA)
    expect_same_model("there", text.encode(), LLAMA)
    for not_json in (b"[" * 100_000, b"", b"[]", b"\xff"):
        expect_same_model("there", not_json, LLAMA)


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "hf").write_text("mine")
    assert "is a file, and only a folder can be replaced" in refusal(tmp_path / "hf", tmp_path)


@pytest.mark.parametrize("out", [".", "..", "../work"])
def test_the_working_folder_and_those_above_it_are_not_replaced(tmp_path, monkeypatch, out):
    export(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    assert "is or contains the working folder" in refusal(Path(out), tmp_path)


def test_the_home_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(export(tmp_path / "home")))
    assert "is or contains the home folder" in refusal(tmp_path / "home", tmp_path)


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="there is no mount point that cannot be harmed")
def test_a_mount_point_is_not_replaced(tmp_path):
    assert "is a mount point" in refusal(Path("/proc"), tmp_path)


@pytest.mark.parametrize(
    ("source", "out", "told"),
    [
        ("hf", "hf", "is or contains the source"),
        ("hf/checkpoints/step-00000001", "hf", "is or contains the source"),
        ("run", "run/export", "lies inside the source"),
        ("link", "hf", "is or contains the source"),
    ],
)
def test_what_overlaps_the_source_is_not_replaced(tmp_path, source, out, told):
    export(tmp_path / out)
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    assert told in refusal(tmp_path / out, tmp_path, source=tmp_path / source)


class Meanwhile(dict[str, torch.Tensor]):
    """Weights; while they are written beside `folder`, somebody puts notes into it."""

    folder: Path

    def __getitem__(self, name: str) -> torch.Tensor:
        if len(list(self.folder.parent.iterdir())) > 1:
            (self.folder / "notes.txt").write_text("mine")
        return super().__getitem__(name)


def test_what_comes_into_the_replaced_folder_meanwhile_is_not_lost(tmp_path):
    export(tmp_path / "hf")
    weights = Meanwhile(STATE)
    weights.folder = tmp_path / "hf"
    export_folder(weights, LLAMA, tmp_path / "hf", overwrite=True)
    assert [path.read_text() for path in tmp_path.rglob("notes.txt")] == ["mine"]


@pytest.mark.parametrize("limit", [200, 20_000])
def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path, limit):
    """200 bytes: config.json does not fit; 20,000: the weights do not."""
    export(tmp_path / "hf")
    before = tree(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        with pytest.raises(FolderError, match=r"hf: cannot be written \(.*File too large.*Free space"):
            export(tmp_path / "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert tree(tmp_path) == before


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_every_file_and_the_folder_follow_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = export(tmp_path / "hf")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o666 & ~umask}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask
