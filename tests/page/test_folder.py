"""The page as a folder: parts that are missing are named, and in a browser it plans what the command line plans."""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest
from page.dropped import LLAMA
from page.test_question import without_its_own_time

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.cli.main import main
from ultrascale.cli.plan.page import question
from ultrascale.page.controls import controls_json
from ultrascale.page.folder import PACKAGES, STATIC, digest

LARGEST = 15_000_000
"""Bytes of the whole folder."""
DRAWN = 200 if os.environ.get("ULTRASCALE_NIGHTLY") == "1" else 8
SMALL = {"model": "gpt2", "count": "8", "machine": "h100-sxm", "seq_len": "1024"}
VALUES = {
    "tokens_per_batch": ("1M", "4M"), "tp": ("1", "2", "8"), "pp": ("1", "2", "4"), "ep": ("1", "8"),
    "zero_stage": ("0", "1", "2", "3"), "recompute": ("none", "full", "selective"), "precision": ("bf16", "fp8"),
    "stack": ("megatron", "torchtitan", "automodel"),
}  # fmt: skip


KINDS = SMALL | {"model": "gemma-3-12b", "tokens_per_batch": "4M", "stack": "megatron"}
"""Blocks of two kinds: added up by `np.einsum`, in an order of the processor's own, their seconds differ in the last bits."""


def drawn(count: int) -> list[dict[str, str]]:
    """Questions about models and machines of the catalogue; some have no answer but a sentence."""
    draw = random.Random(0)
    models = [name for name, model in PRESETS.items() if not name.startswith("tiny") and model.num_hidden_layers < 100]
    machines = ["h100-sxm", "a100-80", "b200", "mi300x", "v100-32", "rtx-5090"]
    found = []
    for _ in range(count):
        one = {"model": draw.choice(models), "count": draw.choice(["1", "8", "64"]), "machine": draw.choice(machines)}
        one |= {"seq_len": draw.choice(["1024", "4096"])}
        found.append(one | {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.3})
    return found


@pytest.fixture(scope="module")
def parts():
    """npm's packages, which `.ci/run` fetches; tests fetch nothing."""
    found = Path(os.environ.get("ULTRASCALE_PAGE_PARTS", ".venv/page-parts"))
    if not all((found / file).is_file() for file, _ in PACKAGES.values()):
        pytest.skip(f"no built page: {found} has no npm packages of Pyodide and NumPy (npm pack {' '.join(PACKAGES)})")
    return found


@pytest.fixture(scope="module")
def built(parts, tmp_path_factory):
    """A built folder."""
    folder = tmp_path_factory.mktemp("page") / "site"
    assert main(["page", "--build", str(folder), "--parts", str(parts)]) == 0
    assert sum(path.stat().st_size for path in folder.rglob("*")) < LARGEST
    return folder


@pytest.fixture(scope="module")
def site(built):
    """Where it is served, by a server of plain files, and folders beside it."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built.parent))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/site/"
        server.shutdown()


def test_without_npm_and_its_packages_a_sentence_says_how_to_get_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["page", "--build", str(tmp_path / "site")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "needs npm, which is not installed" in told and f"npm pack {' '.join(PACKAGES)}" in told
    assert not (tmp_path / "site").exists()


def test_parts_that_are_missing_or_others_are_refused_by_name(tmp_path, capsys):
    words = ["page", "--build", str(tmp_path / "site"), "--parts", str(tmp_path)]
    assert main(words) == 2
    assert "has no pyodide-0.24.1.tgz" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "pyodide-0.24.1.tgz").write_bytes(b"another")
    assert main(words) == 2
    assert "is not what was published under that name" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "site").exists()


@pytest.mark.parametrize("there", ["a folder with a file", "a file", "a file above"])
def test_nothing_is_written_over(there, tmp_path, monkeypatch, capsys):
    site = tmp_path / "site"
    if there != "a folder with a file":
        site.touch()
    else:
        site.mkdir()
        (site / "mine.txt").touch()
    monkeypatch.setenv("PATH", "")  # npm would fetch
    assert main(["page", "--build", str(site if there != "a file above" else site / "below")]) == 2
    assert ("no folder that can be" if site.is_file() else "is not an empty folder") in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_place_that_may_not_be_written_is_told_before_anything_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    monkeypatch.setenv("PATH", "")  # npm would fetch
    assert main(["page", "--build", str(tmp_path / "new" / "site")]) == 2
    assert f"{tmp_path} is no folder that can be written" in " ".join(capsys.readouterr().err.split())


def test_parts_are_for_a_build(capsys):
    assert main(["page", "--parts", "here"]) == 2
    assert "nothing is built" in capsys.readouterr().err


def test_it_plans_in_the_browser_and_a_link_is_a_plan(tab, site):
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("#status:has-text('Planned in')")
    assert "gpt2" in tab.inner_text("#facts")
    tab.fill("[name=count]", "16")
    tab.press("[name=count]", "Enter")
    tab.wait_for_function("document.querySelector('#facts').innerText.includes('16 x')")
    assert "count=16" in tab.url
    tab.go_back()
    tab.wait_for_function("document.querySelector('#facts').innerText.includes('8 x')")


def test_every_file_that_could_be_an_older_one_is_asked_for_by_its_build(tab, site, built):
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("#status:has-text('Planned in')")
    made = json.loads((built / "controls.json").read_text())["build"]
    for name in (*STATIC, "pyodide.mjs", "site.zip", "stdlib.zip"):
        assert [url for url in asked if urlsplit(url).path.endswith(name)] == [f"{site}{name}?{made}"]


def test_nothing_is_asked_of_another_host(tab, site):
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("#status:has-text('Planned in')")
    assert asked and [url for url in asked if not url.startswith((site, "data:"))] == []


FORGED = """async () => {
  const store = (await answers)("readwrite");
  for (const key of await result(store.getAllKeys())) {
    const one = await result(store.get(key)), answer = JSON.parse(one.text);
    if (answer.title) answer.title.model = "kept";
    store.put({ ...one, text: JSON.stringify(answer) }, key);
  }
  await new Promise((done) => { store.transaction.oncomplete = done; });
}"""
"""Marks what the browser keeps, so that it is seen where it is drawn."""


def test_a_plan_of_before_is_drawn_while_python_starts_and_only_of_the_same_build(tab, site, built):
    asked = "?model=gpt2&count=8&seq_len=1024"
    tab.goto(site + asked)
    tab.wait_for_selector("body[data-state=done]")
    planned = tab.evaluate("shown")
    tab.wait_for_function("async () => await result((await answers)('readonly').count()) === 2")
    tab.reload()
    tab.wait_for_selector("#status:has-text('Planned before')")
    tab.wait_for_selector("body[data-state=done]")
    assert tab.evaluate("shown") == planned
    tab.fill("[name=count]", "16")
    tab.wait_for_selector("#status:has-text('Planned in')")
    assert "16 x" in tab.inner_text("#facts")
    tab.evaluate(FORGED)
    tab.goto(site + asked)
    tab.wait_for_function("shown && shown.title.model === 'kept'")

    other = built.parent / "other"
    shutil.copytree(built, other)
    with zipfile.ZipFile(other / "site.zip", "a") as archive:
        archive.writestr("ultrascale/another_version.py", "")
    (other / "controls.json").unlink()
    (other / "controls.json").write_text(json.dumps(controls_json() | {"build": digest(other)}))
    tab.goto(site.replace("/site/", "/other/") + asked)
    tab.wait_for_selector("#status:has-text('Planned in')")
    assert tab.evaluate("shown.title") == planned["title"]


def test_the_newest_answers_are_kept_and_none_of_a_dropped_file(tab, site):
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("body[data-state=done]")
    tab.evaluate("async () => { for (let one = 0; one < KEPT + 9; one++) await keepAnswer(`made ${one}`, '{}'); }")
    keys = tab.evaluate("async () => await result((await answers)('readonly').getAllKeys())")
    assert len(keys) == tab.evaluate("KEPT") and f"made {len(keys) + 8}" in keys and "made 8" not in keys
    told = ask(tab, SMALL | {"file": {"name": "config.json", "text": json.dumps(LLAMA)}})
    assert "error" not in told
    assert keys == tab.evaluate("async () => await result((await answers)('readonly').getAllKeys())")


KEEPS_NOTHING = {
    "site data are blocked": "indexedDB.open = () => { throw new DOMException('blocked', 'SecurityError'); };",
    "no answer": "indexedDB.open = () => ({});",
    "no room": "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); };",
}


@pytest.mark.parametrize("script", KEEPS_NOTHING.values(), ids=KEEPS_NOTHING)
def test_a_browser_that_keeps_nothing_plans(tab, site, script):
    tab.add_init_script(script)
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("#status:has-text('Planned in')")
    tab.wait_for_selector("body[data-state=done]")


def ask(tab, asked):
    """The answer of the worker to a question. A huge text is made in the tab: to carry it there takes half a minute."""
    if asked.get("file", {}).get("text") is HUGE:
        asked = asked | {"file": asked["file"] | {"text": ""}}
        return tab.evaluate(f"asked => source.ask({{...asked, file: {{...asked.file, text: 'x'.repeat({len(HUGE)})}}}})", asked)
    return tab.evaluate("question => source.ask(question)", asked)


@pytest.mark.draws
def test_its_answers_are_those_of_the_command_line(tab, site):
    """To the last digit: the same package, on another machine's arithmetic."""
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("#status:has-text('Planned in')")
    for asked in [KINDS, *drawn(DRAWN)]:
        here, there = question(asked), ask(tab, asked)
        for answer in (here, there):
            if "json" in answer:
                answer["json"] = without_its_own_time(answer["json"])
        assert json.loads(json.dumps(here)) == there, asked


HUGE = "x" * 50_000_000
NONSENSE = [
    {"model": "lama-3-8b"}, {"count": "-8"}, {"count": "1000000000000"}, {"seq_len": "many"},
    {"file": {"name": "config.json", "text": json.dumps(LLAMA | {"hidden_size": None})}},
    {"file": {"name": "config.json", "text": HUGE}},
]  # fmt: skip


def test_nonsense_gets_the_same_sentence(tab, site):
    tab.goto(f"{site}?model=gpt2&count=8&seq_len=1024")
    tab.wait_for_selector("#status:has-text('Planned in')")
    for wrong in NONSENSE:
        here = question(SMALL | wrong)
        assert "error" in here and ask(tab, SMALL | wrong) == here


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "npm error code E404"),
        ("exit 3", "exit status 3"),
        ("exit 0", "has no pyodide"),
    ],
)
def test_an_npm_that_fails_says_why(script, told, tmp_path, monkeypatch, capsys):
    npm = tmp_path / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert main(["page", "--build", str(tmp_path / "site")]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "site").exists()
