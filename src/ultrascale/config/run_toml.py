"""A resolved run as TOML text: what the run folder keeps and the workers read."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

from ultrascale.description.run import Run

_HEAD = "# A resolved run: every value that decides what it computes. Read again, it gives the same run.\n"


def to_toml(run: Run) -> str:
    """Every field of `run`, defaults and all; `resolve` of it gives `run` again. None is written as "none"."""
    return _HEAD + "\n".join(_section(run, "")) + "\n"


def _section(item: Any, name: str) -> list[str]:
    plain = [f"[{name}]"] if name else []
    tables: list[str] = []
    for field in fields(item):
        value = getattr(item, field.name)
        if is_dataclass(value):
            tables += ["", *_section(value, f"{name}.{field.name}" if name else field.name)]
        else:
            plain.append(f"{field.name} = {toml_value(value)}")
    return plain + tables


def toml_value(value: Any) -> str:
    """A setting as TOML has it."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if is_dataclass(value):
        return "{" + ", ".join(f"{field.name} = {toml_value(getattr(value, field.name))}" for field in fields(value)) + "}"
    return repr(value)
