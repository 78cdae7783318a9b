"""A real server of Azure's blobs for tests: azurite (an npm package), in a process of its own.

Where it is not installed, tests that need it are skipped, and say so by its name. Beside the environment: npm install --prefix
.venv azurite.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

import pytest
from port_servers import server_at_a_port

CONTAINER = "container"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Key of the emulator's only account, the same on every machine and printed in its manual."""


def server_command() -> str | None:
    """Path of azurite's server of blobs; None if it is not installed."""
    beside = Path(sys.prefix) / "node_modules" / ".bin" / "azurite-blob"
    return shutil.which("azurite-blob") or (str(beside) if beside.exists() and shutil.which("node") else None)


@contextmanager
def azure_server() -> Iterator[str]:
    """The address of a server with one empty container, while inside."""
    command = server_command()
    if command is None or find_spec("obstore") is None:
        pytest.skip("no Azure server here: azurite (npm install --prefix .venv azurite) or obstore is not installed")
    words = [command, "--silent", "--inMemoryPersistence", "--disableTelemetry", "--blobPort"]
    answers = lambda port: _answers(f"http://127.0.0.1:{port}")  # noqa: E731
    with server_at_a_port("azurite", lambda port: [*words, str(port)], answers) as port:
        yield f"http://127.0.0.1:{port}"


def _answers(address: str) -> bool:
    """True once the container has been made, by a request signed as Azure's documentation of shared keys says."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed = f"PUT{12 * chr(10)}{named}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    tag = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{tag}", "Content-Length": "0"}
    url = f"{address}/{ACCOUNT}/{CONTAINER}?restype=container"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
    except (URLError, ConnectionError):
        return False
    return True


@contextmanager
def azure_at(address: str) -> Iterator[None]:
    """While inside, this process's environment leads to the server at `address`."""
    before = dict(os.environ)
    os.environ.update({"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": address})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
