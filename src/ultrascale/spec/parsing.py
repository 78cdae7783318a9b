"""JSON and TOML that people or strangers wrote. The standard library's parsers also end in RecursionError for deep nesting and
in a bare ValueError for integers of thousands of digits; here everything that is wrong with a text is a ValueError."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

MOST_KEY_PARTS = 100
_BETWEEN_KEYS = re.compile(r"[=\[\]{},#\n]")
_DEEP = "is nested too deeply"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError (JSONDecodeError where there is a line to name) for any other text."""
    return _parsed(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError (TOMLDecodeError where there is a line to name) for any other text, and for
    keys of hundreds of parts: the standard library keeps every beginning of a key, in memory that grows with the square."""
    if any(part.count(".") > MOST_KEY_PARTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(_DEEP)
    return _parsed(tomllib.loads, text)


def line_of(error: ValueError, where: object) -> str:
    """`where:line`, if the error of `parse_json` has a line."""
    return f"{where}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(where)


def _parsed(parse: Callable[[Any], Any], text: Any) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(_DEEP) from None
