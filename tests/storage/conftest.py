"""One server a vendor for all tests of this folder, and a fresh prefix of its bucket for each."""

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from azure_server import CONTAINER, azure_at, azure_server
from gcs_server import BUCKET as GOOGLE_BUCKET
from gcs_server import gcs_at, gcs_server
from hub_server import REPO, Hub, hub_server
from s3_server import BUCKET, Proxy, proxied, reached_at, s3_server

from ultrascale.data import corpus
from ultrascale.storage import Store, hub, open_store, parts

PREPARE = """
import sys
from pathlib import Path
from data.little_text import lines, recipe
from ultrascale.data.preparing.prepare import prepare
from ultrascale.data.tokenizer import train_tokenizer
folder = Path(sys.argv[1])
train_tokenizer([" ".join(lines()[:50])], 300).save(str(folder / "tokenizer.json"))
(folder / "text.jsonl").write_text("\\n".join('{"text": "%s"}' % line for line in lines()))
prepare([folder / "text.jsonl"], output=folder / "prepared", recipe=recipe(folder / "tokenizer.json"), workers=1)
"""


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def url(server: str) -> Iterator[str]:
    """A prefix of the bucket that nothing is under yet; the environment leads to the server."""
    with reached_at(server):
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    """A proxy before the server, to which the environment leads."""
    with proxied(server) as between, reached_at(between.address):
        yield between


@pytest.fixture(scope="session")
def azure() -> Iterator[str]:
    with azure_server() as address:
        yield address


@pytest.fixture
def azure_url(azure: str) -> Iterator[str]:
    """A prefix of the container that nothing is under yet; the environment leads to the server."""
    with azure_at(azure):
        yield f"az://{CONTAINER}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def google() -> Iterator[str]:
    with gcs_server() as address:
        yield address


@pytest.fixture
def google_url(google: str) -> Iterator[str]:
    """A prefix of the bucket that nothing is under yet; the environment leads to the server."""
    with gcs_at(google):
        yield f"gs://{GOOGLE_BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def hub_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in of the Hub to which huggingface_hub goes, with a key."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    with hub_server() as here:
        files = here.address + "/{repo_id}/resolve/{revision}/{filename}"
        there = {"ENDPOINT": here.address, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_DISABLE_XET": True}
        for name, setting in there.items():  # which were read from the environment when the package was imported
            monkeypatch.setattr(constants, name, setting)
        for name, value in {"HF_TOKEN": "hf_right", "HF_ENDPOINT": here.address, "HF_HUB_DISABLE_XET": "1"}.items():
            monkeypatch.setenv(name, value)
        hub.COMMITS.clear()
        yield here
        hub.COMMITS.clear()


@pytest.fixture
def hub_url(hub_here: Hub) -> str:
    """A folder of a repository of the stand-in."""
    return f"hf://{REPO}/{uuid.uuid4().hex}"


@pytest.fixture
def part_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the size of parts, so that a small file has several."""
    return lambda num_bytes: monkeypatch.setattr(parts, "PART_BYTES", num_bytes)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids of a store come in blocks of 256 bytes, so that a sequence has several."""
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 256)


@pytest.fixture(params=["files", "url", "azure_url", "google_url", "hub_url"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Folders, the servers of three vendors, and the Hub's stand-in, in turn."""
    if request.param == "files":
        return open_store(tmp_path / "store")
    return open_store(request.getfixturevalue(request.param), patience_seconds=5, to_write=True)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several shards, made by a process of its own: what has used a bucket must not fork."""
    folder = tmp_path_factory.mktemp("text")
    tests = Path(__file__).parents[1]
    code = f"import sys; sys.path[:0] = [{str(tests)!r}]\n{PREPARE}"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=200)
    assert len(list((folder / "prepared").glob("*.bin"))) > 3
    return folder / "prepared"
