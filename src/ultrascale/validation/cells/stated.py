"""Statements about measured runs in their sources' text, outside the cells of their rows: read from `stated.toml`, as cells.

    [[stated]]
    source_key = "megatron-sc21"        source of the rows
    when = { framework = "Megatron-LM" }   condition on cells: contain this text, or are not blank (true)
    cells = { stack = "megatron-2022" } values of blank cells
    from = "place of the statement"

If a source is excluded, so are its entries.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from ultrascale.validation.cells.programs import Tuning, stated_cells
from ultrascale.validation.rows import RunConfig

SCAN = "playbook"
"""Source of rows in the form of the playbook's scan."""


def with_stated(config: RunConfig, tuning: Tuning) -> tuple[RunConfig, tuple[str, ...]]:
    """The row with its source's statements, and where they are made."""
    statements: list[str] = []
    key = source_of(config)
    if key in tuning.without:
        return config, ()
    for entry in _entries():
        if entry["source_key"] == key and _holds(config, entry.get("when", {})):
            config = stated_cells(config, entry["cells"])
            cells = ", ".join(f"{name} = {value}" for name, value in entry["cells"].items())
            statements.append(f"{cells} ({entry['from']})")
    return config, tuple(statements)


def source_of(config: RunConfig) -> str:
    """Name of a row's source."""
    return SCAN if config.is_playbook else config.source_key or config.framework or "unnamed"


@cache
def _entries() -> list[dict[str, Any]]:
    return tomllib.loads((files("ultrascale.validation") / "stated.toml").read_text(encoding="utf-8"))["stated"]


def _holds(config: RunConfig, when: dict[str, Any]) -> bool:
    values = {name: getattr(config, name) for name in when}
    return all(
        want in values[name] if isinstance(want, str) else bool(values[name]) if want is True else values[name] == want
        for name, want in when.items()
    )
