"""`ultrascale export --push-to-hub`, with the real huggingface_hub, against a stand-in of the Hub's HTTP interface."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.problems import SpecError
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder
from ultrascale.models.hub import expect_pushable, model_card
from ultrascale.models.initialise import initialise

MODEL = PRESETS["tiny-llama"]
REPO = "ada/tiny"


class Hub(ThreadingHTTPServer):
    """Models in memory. It takes what huggingface_hub 1 and 2 send: create, preupload, LFS, commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.private: bool | None = None
        self.refuse: dict[str, int] = {}
        """Parts of paths, and the status that answers them."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._refused():
            self.say({"id": REPO, "sha": "0" * 40, "siblings": [{"rfilename": name} for name in self.server.files]})

    def do_HEAD(self) -> None:
        if self._refused():
            return
        name = self.path.rpartition("/")[2].partition("?")[0]
        found = name in self.server.files
        headers = {"X-Repo-Commit": "0" * 40, "ETag": '"1"'} if found else {"X-Error-Code": "EntryNotFound"}
        self.say(None, status=200 if found else 404, headers=headers)

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self.body()
        self.say({})

    def do_POST(self) -> None:
        body, hub = self.body(), self.server
        if self._refused():
            return
        if self.headers["Authorization"] != "Bearer hf_right":
            self.say({"error": "Invalid credentials"}, status=401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            hub.private = asked.get("private", asked.get("visibility") == "private")
            self.say({"url": f"{hub.address}/{REPO}"})
        elif "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(body)["files"]]
            mode = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            self.say({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, mode, strict=True)]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            upload = [{**one, "actions": {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}} for one in wanted]
            self.say({"transfer": "basic", "objects": upload}, kind="application/vnd.git-lfs+json")
        elif "/commit/" in self.path:
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.say({})

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value["summary"])
            elif line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                held = self.server.objects[value["oid"]]
                assert hashlib.sha256(held).hexdigest() == value["oid"] and len(held) == value["size"]
                self.server.files[value["path"]] = held
        self.say({"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.server.address}/{REPO}/commit/{'1' * 40}"})

    def _refused(self) -> bool:
        status = next((status for part, status in self.server.refuse.items() if part in self.path), None)
        if status is not None:
            self.say({"error": "no"}, status=status)
        return status is not None

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def say(
        self, value: Any, *, status: int = 200, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        text = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Type": kind, "Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(name, content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def exported(tmp_path) -> Path:
    decoder = Decoder(MODEL)
    initialise(decoder, MODEL, seed=0)
    return export_folder(decoder.state_dict(), MODEL, tmp_path / "exported")


def push(hub: Hub, exported: Path, *words: str, token: str = "hf_right") -> subprocess.CompletedProcess[str]:
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    own = {"HF_ENDPOINT": hub.address, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(exported.parent / "hf")}
    command = [sys.executable, "-m", "ultrascale", "export", str(exported), str(exported.parent / "out"), *words]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False, timeout=250)


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
