"""The built folder names what it lacks, and holds all parts where they are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ultrascale.cli.main import main
from ultrascale.page.folder import RUNTIME, WHEELS


def test_without_parts_it_names_every_one(tmp_path, capsys):
    assert main(["page", "--build", str(tmp_path / "site")]) == 2
    told = capsys.readouterr().err
    assert [name for name in (*RUNTIME, "numpy-*wasm32.whl", *WHEELS) if name not in told] == []
    assert not (tmp_path / "site").exists()


def test_only_what_is_missing_is_named(tmp_path, capsys):
    for name in (*RUNTIME, *(f"{name}-1.0-py3-none-any.whl" for name in WHEELS)):
        (tmp_path / name).touch()
    assert main(["page", "--build", str(tmp_path / "site"), "--pyodide", str(tmp_path)]) == 2
    assert "lacks numpy-*wasm32.whl\n" in capsys.readouterr().err


def test_it_plans_in_the_browser(tab, tmp_path):
    """With the folder of parts that PYODIDE_PARTS names: NumPy for it is in no registry of packages."""
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    if "PYODIDE_PARTS" not in os.environ:
        pytest.skip("no built page: PYODIDE_PARTS names no folder with Pyodide and its wheel of NumPy")
    site = tmp_path / "site"
    assert main(["page", "--build", str(site), "--pyodide", os.environ["PYODIDE_PARTS"]]) == 0
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(Path(site)))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/?model=gpt2&count=8&seq_len=1024")
        tab.wait_for_selector("#status:has-text('Planned in')", timeout=120_000)
        assert "gpt2" in tab.inner_text("#facts")
        server.shutdown()
