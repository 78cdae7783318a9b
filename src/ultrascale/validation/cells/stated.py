"""Statements of measured runs' sources that stand in their text and in no cell of their rows: read from `stated.toml`, as
cells.

    [[stated]]
    source_key = "megatron-sc21"        whose rows
    when = { framework = "Megatron-LM" }   of them those whose cells hold this text, or are not blank (true)
    cells = { stack = "megatron-2022" } cells of theirs that are blank
    from = "where it says so"

Judged without a source, its entries are left out with it.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from ultrascale.validation.cells.programs import Tuning, stated_cells
from ultrascale.validation.rows import Asked

SCAN = "playbook"
"""The source of rows in the form of the playbook's scan."""


def with_stated(asked: Asked, tuning: Tuning) -> tuple[Asked, tuple[str, ...]]:
    """The row with what its source states of it, and where."""
    told: list[str] = []
    key = source_of(asked)
    if key in tuning.without:
        return asked, ()
    for entry in _entries():
        if entry["source_key"] == key and _holds(asked, entry.get("when", {})):
            asked = stated_cells(asked, entry["cells"])
            cells = ", ".join(f"{name} = {value}" for name, value in entry["cells"].items())
            told.append(f"{cells} ({entry['from']})")
    return asked, tuple(told)


def source_of(asked: Asked) -> str:
    """The name that a row's source has here."""
    return SCAN if asked.is_playbook else asked.source_key or asked.framework or "unnamed"


@cache
def _entries() -> list[dict[str, Any]]:
    return tomllib.loads((files("ultrascale.validation") / "stated.toml").read_text(encoding="utf-8"))["stated"]


def _holds(asked: Asked, when: dict[str, Any]) -> bool:
    found = {name: getattr(asked, name) for name in when}
    return all(
        want in found[name] if isinstance(want, str) else bool(found[name]) if want is True else found[name] == want
        for name, want in when.items()
    )
