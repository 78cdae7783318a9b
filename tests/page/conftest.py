"""A browser, where one is installed."""

from __future__ import annotations

import shutil
from threading import Thread

import pytest

from ultrascale.cli.plan.page import question
from ultrascale.page.server import PageServer


@pytest.fixture(scope="session")
def browser():
    """The distribution's Chromium, headless."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser test: playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no browser test: there is no chromium here")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def link():
    """Where the page is served."""
    with PageServer(question) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.fixture
def tab(browser):
    """A fresh tab that fails the test on any error of the page's own."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    found = context.new_page()
    found.set_default_timeout(120_000)  # a machine that runs other tests too
    errors: list[str] = []
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    yield found
    context.close()
    assert errors == []
