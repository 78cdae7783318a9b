"""The documentation names only what exists."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import fields
from importlib import import_module

import pytest
from tidy.sources import MODULES, PACKAGE, PAGES, ROOT, short

from ultrascale.cli.main import VERBS
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Checkpoint, Data, Evaluation, Log, Optimizer
from ultrascale.description.sections.launch import Kubernetes, Launch, SkyPilot, Slurm
from ultrascale.description.sections.trackers import Mlflow, Tensorboard, Trackio, Wandb

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = sorted({path.parent for path in MODULES if path.parent != PACKAGE})
PACKAGES = [folder.name for folder in FOLDERS if folder.parent == PACKAGE]
SECTIONS = {"model": Model, "layout": Layout, "batch": Batch, "data": Data, "optimizer": Optimizer, "checkpoint": Checkpoint,
            "evaluation": Evaluation, "log": Log, "log.wandb": Wandb, "log.mlflow": Mlflow, "log.trackio": Trackio,
            "log.tensorboard": Tensorboard, "launch": Launch,
            "launch.slurm": Slurm, "launch.kubernetes": Kubernetes, "launch.skypilot": SkyPilot}  # fmt: skip
SETTINGS = {f"{section}.{field.name}" for section, kind in SECTIONS.items() for field in fields(kind)}
SETTING = re.compile(rf"(?:--)?((?:{'|'.join(SECTIONS)})\.[\w-]+)(?: = .*| [\w-]+)?$")
WRITTEN_ONLY = {"model.preset", "model.path", "batch.tokens_per_batch", "log.txt"}
"""Keys that are resolved into others, and a file."""
DOTTED = re.compile(rf"(?:ultrascale\.)?((?:{'|'.join(PACKAGES)})(?:\.(?!json$)\w+)+)(?:\(.*\))?$")
FILE = re.compile(r"(?:src|tests|docs|benchmarks|runs)/[\w./-]+\.\w+$")


MAP_LINE = re.compile(r"^(\w+(?:, \w+)*) {2,}\S", re.MULTILINE)
"""Of a package's docstring: the modules that a line is about, in a column of their own."""


def missing_name(dotted: str) -> str:
    """The first part of `description.architecture.weights.weights` that does not exist, or nothing."""
    parts = dotted.split(".")
    thing = import_module("ultrascale")
    for depth, part in enumerate(parts, 1):
        if not hasattr(thing, part):
            try:
                import_module(f"ultrascale.{'.'.join(parts[:depth])}")
            except ModuleNotFoundError:
                annotated = part in getattr(thing, "__annotations__", {})
                return "" if annotated else ".".join(parts[:depth])
        thing = getattr(thing, part)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_link_leads_somewhere(page):
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_setting_named_in_a_page_exists(page):
    found = (SETTING.match(text) for text in CODE.findall(page.read_text()))
    keys = {match.group(1).replace("-", "_") for match in found if match and not DOTTED.match(match.group(0))}
    assert keys - SETTINGS - WRITTEN_ONLY == set()


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_name_of_the_package_in_a_page_exists(page):
    names = [
        found.group(1) for text in CODE.findall(page.read_text()) if (found := DOTTED.match(text)) and text not in SETTINGS
    ]
    assert [missing for name in names if (missing := missing_name(name))] == []


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_every_file_named_in_a_page_exists(page):
    files = [text for text in CODE.findall(page.read_text()) if FILE.match(text)]
    assert [file for file in files if not (ROOT / file).exists()] == []


METRIC = re.compile(r'"((?:train|perf|mem|moe|progress|plan|val|outer)/\w+)"')


def test_every_metric_of_a_run_is_on_the_page_about_training():
    page = (ROOT / "docs" / "training.md").read_text()
    files = [path for path in MODULES if path.parts[len(PACKAGE.parts)] in ("train", "islands")]
    names = {name for path in files for name in METRIC.findall(path.read_text())}
    assert len(names) > 20 and [name for name in sorted(names) if f"`{name}`" not in page] == []


CODE_OF_SRC = re.compile(rf"(?:{'|'.join(PACKAGES)})/[\w./]+$")


def missing_in_source(span: str) -> bool:
    """True if `package/folder`, `package/file.py` or `package/module.name` is not in the source."""
    if (PACKAGE / span).exists():
        return False
    module, _, name = span.rpartition(".")
    file = PACKAGE / f"{module}.py"
    return not file.exists() or re.search(rf"\b{name}\b", file.read_text()) is None


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"], ids=short)
def test_every_place_of_the_source_in_a_page_for_contributors_exists(page):
    spans = [span for span in CODE.findall(page.read_text()) if CODE_OF_SRC.match(span)]
    assert len(spans) > 4 and [span for span in spans if missing_in_source(span)] == []


def test_lines_that_the_architecture_counts_are_nearly_as_many():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for span, said in re.findall(r"`([\w/.]+)`, (\d+) lines", page):
        place = PACKAGE / span
        files = [place] if place.is_file() else sorted(place.glob("*.py"))
        assert sum(len(file.read_text().splitlines()) for file in files) == pytest.approx(int(said), rel=0.1), span
    first = re.findall(r"^\| `(src/[\w/.]+)`", page, re.MULTILINE)
    said = re.search(r"Some ([\d,]+) lines", page)
    assert said and len(first) == 12
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in first)
    assert lines == pytest.approx(int(said[1].replace(",", "")), rel=0.05)


def test_every_chapter_is_linked_from_the_readme_or_another_chapter():
    linked = {(page.parent / link).resolve() for page in PAGES for link in LINK.findall(page.read_text())}
    assert [short(page) for page in PAGES[1:] if page.resolve() not in linked] == []


def test_every_package_is_in_the_architecture_page():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert [package for package in PACKAGES if f"| `{package}` |" not in text] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=short)
def test_every_module_in_the_map_of_a_package_exists(folder):
    """What a package's docstring says of where to begin: modules, and rooms of a package."""
    told = import_module(f"ultrascale.{'.'.join(folder.relative_to(PACKAGE).parts)}").__doc__ or ""
    names = {name for found in MAP_LINE.finditer(told) for name in found[1].split(", ")}
    assert [name for name in sorted(names) if not any((folder / kind).exists() for kind in (name, f"{name}.py"))] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=short)
def test_a_room_has_ten_files_at_most(folder):
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 10


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- prints:" in page.read_text()], ids=short)
def test_what_a_page_says_a_command_prints_is_what_it_prints(page):
    words = [sys.executable, str(ROOT / ".ci" / "paste_printed.py"), "--check", short(page)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_sample_with_another_word_or_a_number_further_off_is_no_longer_true():
    paste = runpy.run_path(str(ROOT / ".ci" / "paste_printed.py"))
    assert paste["same"]("a 10.0 s ██ b", "a 10.4 s █ b") and not paste["same"]("a 10.0 s", "a 11.0 s")
    assert not paste["same"]("a 1 s", "b 1 s") and not paste["same"]("1\n2", "1 2")


def test_the_page_of_the_api_says_of_every_verb_whether_it_is_a_function():
    named = set(re.findall(r"`(?:ultrascale )?(\w+)", (ROOT / "docs" / "api.md").read_text()))
    assert [verb for verb in VERBS if verb not in named] == []
