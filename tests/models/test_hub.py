"""`ultrascale export --push-to-hub`, with the real huggingface_hub, against a stand-in of the Hub's HTTP interface."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from hub_server import REPO, Hub, hub_server
from safetensors.torch import load_file

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.cli.main import main
from ultrascale.description.problems import SpecError
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder
from ultrascale.models.hub import expect_pushable, model_card
from ultrascale.models.initialise import initialise

MODEL = PRESETS["tiny-llama"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        yield server


@pytest.fixture
def exported(tmp_path) -> Path:
    decoder = Decoder(MODEL)
    initialise(decoder, MODEL, seed=0)
    return export_folder(decoder.state_dict(), MODEL, tmp_path / "exported")


def push(
    hub: Hub, exported: Path, *words: str, token: str = "hf_right", out: str = "", scratch: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`ultrascale export` in a fork of this process, which has torch. huggingface_hub, which reads its environment as it is
    loaded, is loaded there anew."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    own = {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(exported.parent / "hf")}
    own |= {} if scratch is None else {"TMPDIR": str(scratch)}
    command = ["export", str(exported), out or str(exported.parent / "out"), *words]
    said = [exported.parent / name for name in ("stdout", "stderr")]
    process = multiprocessing.get_context("fork").Process(target=_command, args=(command, own, *said))
    process.start()
    process.join(250)
    assert process.exitcode is not None
    return subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in said))


def _command(words: list[str], own: dict[str, str], out: Path, err: Path) -> None:
    os.environ |= own
    tempfile.tempdir = None  # found anew
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    with out.open("w") as stdout, err.open("w") as stderr, redirect_stdout(stdout), redirect_stderr(stderr):
        sys.exit(main(words))


def test_an_export_goes_up_whole_in_one_commit_private_and_with_a_card(hub, exported):
    done = push(hub, exported, "--push-to-hub", REPO, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pushed_to"] == f"{hub.address}/{REPO}"
    assert hub.private is True and len(hub.commits) == 1
    out = exported.parent / "out"
    assert {name: content for name, content in hub.files.items() if name != "README.md"} == {
        path.name: path.read_bytes() for path in out.iterdir()
    }
    card = hub.files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers") and f'from_pretrained("{REPO}")' in card
    assert str(exported.parent) not in card
    (exported.parent / "again").mkdir()
    (exported.parent / "again" / "model.safetensors").write_bytes(hub.files["model.safetensors"])
    weights = load_file(exported.parent / "again" / "model.safetensors")
    assert all(torch.equal(value, load_file(exported / "model.safetensors")[name]) for name, value in weights.items())


def test_an_export_to_the_hub_is_a_push_and_stays_here_if_that_fails(hub, exported, tmp_path):
    (scratch := tmp_path / "scratch").mkdir()
    done = push(hub, exported, "--json", out=f"hf://{REPO}", scratch=scratch)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["pushed_to"] == f"{hub.address}/{REPO}" and told["folder"] == f"hf://{REPO}"
    assert len(hub.commits) == 1 and {"config.json", "model.safetensors", "README.md"} <= set(hub.files)
    assert not [*scratch.iterdir()]
    hub.refuse = {"/commit/": 403}
    done = push(hub, exported, out=f"hf://{REPO}", scratch=scratch)
    (kept,) = scratch.glob("*/export")
    assert done.returncode == 1 and str(kept) in "".join(done.stderr.split("\n")) and (kept / "model.safetensors").exists()
    for place in (f"hf://datasets/{REPO}", f"hf://{REPO}/folder", "hf://tiny"):
        done = push(hub, exported, out=place, scratch=scratch)
        assert done.returncode == 2 and len(hub.commits) == 1, done.stderr


def test_a_card_that_is_there_stays(hub, exported):
    hub.files["README.md"] = b"mine"
    done = push(hub, exported, "--push-to-hub", REPO, "--public")
    assert done.returncode == 0, done.stderr
    assert hub.files["README.md"] == b"mine" and "config.json" in hub.files and hub.private is False
    assert f"pushed to {hub.address}/{REPO}" in done.stdout


@pytest.mark.parametrize("trouble", ["wrong key", "refused commit", "no server"])
def test_what_cannot_be_pushed_is_said_in_a_sentence_and_the_export_stays(hub, exported, trouble):
    if trouble == "refused commit":
        hub.refuse["/commit/"] = 403
    if trouble == "no server":
        hub.server_close()
    done = push(hub, exported, "--push-to-hub", REPO, token="hf_wrong" if trouble == "wrong key" else "hf_right")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "is written, but could not be pushed to ada/tiny" in done.stderr and "hf upload ada/tiny" in done.stderr
    assert (exported.parent / "out" / "model.safetensors").exists() and not hub.files


@pytest.mark.parametrize("repo", ["tiny", "a/b/c", "-a/b", "a/" + "b" * 200])
def test_what_is_no_address_of_a_model_is_refused_before_anything_is_written(repo):
    with pytest.raises(SpecError, match="must be USER/NAME"):
        expect_pushable(repo)


def test_no_package_and_no_key_are_a_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SpecError, match="needs huggingface_hub, which is not installed"):
        expect_pushable(REPO)


def test_a_card_has_what_is_known_of_the_training():
    card = model_card(MODEL, REPO, {"tokens": "1.2B", "train/loss": "2.3456"})
    assert "| tokens | 1.2B |" in card and "| train/loss | 2.3456 |" in card and "| layers | " in card
