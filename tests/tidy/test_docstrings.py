"""Docstrings begin with the noun: what a thing is, or what a function does (docs/style.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tidy.sources import MODULES, parsed, short

FRAGMENT = re.compile(
    r"(Of|What|Where|That|Those|The same|Whether|How|Which|Who|Whose|Gives|Told|Going|Since|Between|Beside|Among|With|From)\b"
)


def text_of(node: ast.stmt) -> str | None:
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return value if isinstance(value, str) else None


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings of modules, classes and functions, and of strings after assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        is_owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        before = [None, *body[:-1]]
        for earlier, one in zip(before, body, strict=True):
            text, is_after = text_of(one), isinstance(earlier, (ast.Assign, ast.AnnAssign))
            if text is not None and (is_after or (earlier is None and is_owner)):
                yield one.lineno, text


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_no_docstring_begins_with_a_fragment(path):
    assert [f"{line} {text.split()[:6]}" for line, text in docstrings(parsed(path)) if FRAGMENT.match(text.lstrip())] == []
