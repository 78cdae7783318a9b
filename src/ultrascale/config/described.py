"""Texts below the fields of a dataclass or a typed dictionary, read off its source: the only description of each key."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from textwrap import dedent
from typing import Any


@cache
def docs_of(kind: Any) -> dict[str, str]:
    """Text below each field that has one, by field name, joined into one line."""
    body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found[field.target.id] = " ".join(inspect.cleandoc(below.value.value).split())  # type: ignore[union-attr]
    return found
