"""hf:// with the real huggingface_hub, against a stand-in of the Hub: read at one commit, never written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import COMMIT, REPO, Hub, hub_server
from safetensors.torch import load_file

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.data.corpus import Corpus
from ultrascale.models.decoder import Decoder
from ultrascale.models.files.huggingface import export_folder
from ultrascale.models.initialise import initialise
from ultrascale.storage import MissingError, StorageError, hub, open_store
from ultrascale.storage.hub import BLOCK_BYTES
from ultrascale.storage.location import url_problem

KEY = "hf_right"


@pytest.fixture
def server(hub_here: Hub) -> Hub:
    return hub_here


def test_a_folder_of_a_repository_is_read_and_listed(server: Hub):
    blocks = bytes(BLOCK_BYTES) + b"1" * BLOCK_BYTES + b"2"
    server.files |= {"a/b/one": b"0123456789", "a/two": b"2", "three": b"", "blocks": blocks}
    store = open_store(f"hf://datasets/{REPO}/a")
    assert store.read("b/one") == b"0123456789" and store.size("b/one") == 10
    assert b"".join(open_store(f"hf://datasets/{REPO}").blocks("blocks")) == blocks
    assert store.read_range("b/one", 2, 5) == b"234" and store.read_range("b/one", 8, 20) == b"89"
    assert store.read_range("b/one", 10, 20) == b""
    objects, folders = store.names("")
    assert [(one.key, one.bytes) for one in objects] == [("two", 1)] and folders == ["b"]
    assert sorted(one.key for one in store.walk("")) == ["b/one", "two"]
    assert store.names("none") == ([], [])
    for ask in (store.read, store.size, store.read_version, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(MissingError, match="a/none is not there"):
            ask("none")
    assert open_store(f"hf://{REPO}").read("three") == b""


def test_all_is_read_at_the_commit_that_was_there_first(server: Hub):
    server.files["one"] = b"1"
    store = open_store(f"hf://{REPO}@main")
    assert store.read_version("one")[1].tag == COMMIT
    server.paths.clear()
    for ask in (store.read, store.size, store.names):
        ask("one")
    assert len(server.paths) == 3 and all(COMMIT in path for path in server.paths), server.paths


def test_all_stores_of_a_process_read_a_repository_at_one_commit(server: Hub):
    server.files["one"] = b"1"
    assert open_store(f"hf://{REPO}").read_version("one")[1].tag == COMMIT
    server.commit_now = "1" * 40
    assert open_store(f"hf://{REPO}@main").read_version("one")[1].tag == COMMIT
    hub.COMMITS.clear()
    assert open_store(f"hf://{REPO}").names("") and all(held == "1" * 40 for held in hub.COMMITS.values())


def test_where_the_hub_sends_for_a_file_is_asked_again_and_the_hub_once_that_fails(server: Hub):
    server.files["one"] = b"0123456789"
    store = open_store(f"hf://{REPO}")
    with hub_server() as other:
        other.files = server.files
        server.elsewhere = other.address.replace("127.0.0.1", "localhost")
        assert store.read_range("one", 2, 4) == b"23"
        server.paths.clear()
        assert store.read_range("one", 4, 6) == b"45" and store.read_range("one", 10, 12) == b"" and not server.paths
        assert len(other.paths) == 3 and not any(KEY in str(told) for told in other.keys)
        other.refuse = {"/resolve/": 403}
        server.elsewhere = ""
        assert store.read_range("one", 4, 6) == b"45" and len(server.paths) == 1


def test_a_hub_that_is_busy_for_a_moment_is_asked_again(server: Hub):
    server.files["one"] = b"1"
    store = open_store(f"hf://{REPO}")
    store.size("one")
    server.refuse, server.refusals_left = {"/resolve/": 503}, 1
    assert store.read("one") == b"1"


def test_a_block_that_lacks_bytes_is_refused_and_a_whole_file_is_cut(server: Hub):
    blocks = bytes(BLOCK_BYTES) + b"1"
    server.files |= {"one": b"0123456789", "blocks": blocks}
    store = open_store(f"hf://{REPO}")
    server.ranges = "ignored"
    assert b"".join(store.blocks("blocks")) == blocks and store.read_range("one", 8, 20) == b"89"
    server.ranges = "short"
    with pytest.raises(StorageError, match="8,388,607 bytes came of a block at 0"):
        list(store.blocks("blocks"))


NO_SUCH = "there is no such repository, or not for this key"
TOLD = {
    "no key": f"{NO_SUCH} (status 401)",
    "no revision": "no revision 'x/y'",
    "refused": f"{NO_SUCH} (status 403)",
    "broken": "does not answer as it should (status 500)",
    "away": "does not answer as it should (",
}


@pytest.mark.parametrize("trouble", TOLD)
def test_what_cannot_be_read_is_told_in_one_sentence_without_the_key(
    server: Hub, monkeypatch: pytest.MonkeyPatch, trouble: str
):
    server.files["one"] = b"1"
    store = open_store(f"hf://{REPO}@x%2Fy" if trouble == "no revision" else f"hf://{REPO}")
    if trouble == "no key":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        server.only_with_key = True
    elif trouble == "away":
        server.shutdown()
        server.server_close()
    elif trouble != "no revision":
        server.refuse = {"/api/": 403 if trouble == "refused" else 500}
    with pytest.raises(StorageError) as caught:
        store.read("one")
    text = str(caught.value)
    assert TOLD[trouble] in text and REPO in text and "\n" not in text and "hf_" not in text and "http" not in text


def test_nothing_is_written(server: Hub, tmp_path: Path):
    store = open_store(f"hf://{REPO}")
    (tmp_path / "file").write_text("1")
    for write in (
        lambda: store.write("x", b"1"), lambda: store.publish("x", b"1", replacing=None), lambda: store.remove(["x"]),
        lambda: store.write_file("x", tmp_path / "file"), lambda: store.expect_usable("x"),
    ):  # fmt: skip
        with pytest.raises(StorageError, match="is only read here: only a run and a sweep"):
            write()
    assert "names a commit" in (url_problem(f"hf://{REPO}@{COMMIT}", to_write=True) or "")
    assert url_problem(f"hf://{REPO}@main/runs", to_write=True) is None and not server.commits
    assert "between slashes" in (url_problem(f"hf://{REPO}/a/.cache", to_write=True) or "")


@pytest.mark.parametrize(
    "place",
    ["hf://ada", "hf://datasets/ada", "hf://ada/tiny?token=x", "hf://key@ada/tiny", "hf://a b/c", "hf://ada/ti--ny",
     "hf://ada/tiny.git/x", "hf://ada/-tiny", "hf://ada./tiny", f"hf://ada/{'x' * 97}@main", "hf://ada/é"],
)  # fmt: skip
def test_what_names_no_repository_is_refused(place: str):
    with pytest.raises(StorageError, match="names no repository"):
        open_store(place)


def test_a_prepared_folder_is_read_from_a_dataset_as_from_a_disk(server: Hub, prepared: Path):
    server.files |= {f"web/{path.name}": path.read_bytes() for path in prepared.iterdir() if path.is_file()}
    here, there = Corpus(prepared), Corpus(f"hf://datasets/{REPO}/web")
    assert here.fingerprint() == there.fingerprint() and here.num_documents == there.num_documents
    for number in (0, 57, here.num_documents - 1):
        assert np.array_equal(here.document(number), there.document(number))


def test_weights_of_a_repository_are_taken(server: Hub, tmp_path: Path):
    model = PRESETS["tiny-llama"]
    decoder = Decoder(model)
    initialise(decoder, model, seed=0)
    own = export_folder(decoder.state_dict(), model, tmp_path / "own")
    server.files |= {path.name: path.read_bytes() for path in own.iterdir()}
    command = [sys.executable, "-m", "ultrascale", "export", f"hf://{REPO}", str(tmp_path / "out"), "--json"]
    reached = os.environ | {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=reached, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    found, expected = load_file(tmp_path / "out/model.safetensors"), load_file(own / "model.safetensors")
    assert found.keys() == expected.keys() and all(found[name].equal(value) for name, value in expected.items())
    assert json.loads(done.stdout)
