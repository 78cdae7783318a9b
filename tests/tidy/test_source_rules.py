"""House rules that a linter does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest
from tidy.sources import MODULES, PACKAGE, ROOT, parsed, short

from ultrascale.api.planning.plan_request import PlanOptions
from ultrascale.catalogue.stacks.stack import Kernels, Overheads, Stack
from ultrascale.catalogue.stacks.stack_files import Abilities, Usual
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import (
    Batch,
    Checkpoint,
    Data,
    Evaluation,
    Faults,
    Log,
    LossScale,
    Optimizer,
    RampStage,
    Run,
    Source,
)
from ultrascale.description.sections.islands import Islands, Outer
from ultrascale.description.sections.launch import Kubernetes, Launch, SkyPilot, Slurm

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}
HOUSE_WORDS = {"Cut", "fan_in", "fan_out", "found", "one", "own", "put_off", "tell", "told"}
"""Names that say nothing to a reader of the field, who wants to know what was found, and one what."""
MOST_PATCHES = 110
"""Places where tests replace an attribute of the product, or of what it stands on. Each holds a name rather than a behaviour:
take another input, a real disk, store or process, or plant the bug in the source (`tests/mutations`)."""


def test_every_folder_of_the_package_is_a_package_with_a_sentence_about_it():
    folders = {path.parent for path in MODULES}
    assert [short(folder) for folder in folders if not ast.get_docstring(parsed(folder / "__init__.py"))] == []


def test_every_module_begins_with_what_it_is_about():
    assert [short(path) for path in MODULES if not ast.get_docstring(parsed(path))] == []


def test_no_module_has_a_name_that_could_hold_anything():
    assert [short(path) for path in MODULES if VAGUE_NAMES & set(path.stem.split("_"))] == []


def names_of(node: ast.AST) -> Iterator[str]:
    """Names that a node of the syntax tree gives, or uses."""
    for name in ("id", "arg", "name", "attr"):
        if isinstance(value := getattr(node, name, None), str):
            yield value


def test_no_name_is_a_house_word():
    named = [
        f"{short(path)}:{getattr(node, 'lineno', 0)} {name}"
        for path in MODULES
        for node in ast.walk(parsed(path))
        for name in names_of(node)
        if name in HOUSE_WORDS and not (name == "tell" and isinstance(node, ast.Attribute))  # of a file
    ]
    assert named == []


def test_a_class_name_stands_once_in_the_package():
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{short(path)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_public_function_and_class_says_what_it_is():
    silent = [
        f"{short(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in parsed(path).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
        and not ast.get_docstring(node) and (node.end_lineno or 0) - node.lineno > 5
    ]  # fmt: skip
    assert silent == []


def attributes_read() -> set[str]:
    """Names of all attributes that the package reads, outside the code that carries every setting around."""
    carriers = {PACKAGE / "description" / "run.py", PACKAGE / "config" / "resolve.py", PACKAGE / "config" / "schema.py"}
    carriers |= {*(PACKAGE / "cli" / "show").glob("*.py"), *(PACKAGE / "config" / "rules").glob("*_rules.py")}
    return {
        node.attr
        for path in MODULES
        if path not in carriers
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


SECTIONS = (Run, Layout, Batch, RampStage, Source, Data, Optimizer, Checkpoint, Evaluation, Log, LossScale, Faults, Launch,
            Slurm, Kubernetes, SkyPilot, Model, Islands, Outer, Stack, Kernels, Overheads, Abilities, Usual,
            PlanOptions)  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_obeyed_somewhere(section):
    read = attributes_read()
    assert [field.name for field in fields(section) if field.name not in read] == []


def test_no_file_names_a_place_of_somebodys_own_machine():
    own = re.compile(r"(?<![\w.}])/(?:root|home|Users|work)/|\.\./shared")
    folders = [ROOT / name for name in ("src", "tests", "docs", "benchmarks", "runs")]  # others come and go with docs' commands
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]
    here = [path for path in files if path.suffix in {".py", ".md", ".toml"} and path.name != "test_source_rules.py"]
    assert [short(path) for path in here if own.search(path.read_text())] == []


def is_patch(node: ast.AST) -> bool:
    """Whether a node of the syntax tree is a call of `monkeypatch.setattr` or `mock.patch`, whatever they are called."""
    match node:
        case ast.Call(func=ast.Attribute(attr="setattr") | ast.Name(id="patch")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="mock"), attr="patch")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="patch"), attr="object")):
            return True
    return False


def test_tests_replace_no_more_attributes_than_they_did():
    patches = [
        f"{short(path)}:{getattr(node, 'lineno', 0)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if re.search(r"setattr|patch", path.read_text())
        for node in ast.walk(parsed(path))
        if is_patch(node)
    ]
    assert len(patches) <= MOST_PATCHES, patches
    calls = (
        "monkeypatch.setattr(os, 'x', 1)",
        "patch.object(os, 'x')",
        "mock.patch('os.x')",
        "dispatch(x)",
        "setattr(self, 'x', 1)",
    )
    assert [is_patch(ast.parse(call, mode="eval").body) for call in calls] == [True, True, True, False, False]
