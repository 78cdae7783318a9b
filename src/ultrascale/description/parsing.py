"""JSON and TOML from untrusted sources. The standard library's parsers also raise RecursionError for deep nesting and a bare
ValueError for integers of thousands of digits, and return integers that no float can hold; here, every error in a text is a
ValueError.
"""

from __future__ import annotations

import errno
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
MOST_TOML, MOST_JSON = MIB, 16 * MIB
"""Most characters of a description; the largest in use have a hundredth of that."""
MOST_KEY_PARTS = 100
MOST_DIGITS = 40
"""Most digits of an integer. The longest in use is transformers' 10^30, for a tokenizer without a limit."""
_KEY_LINE = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\")(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"))*)\s*=")
_TABLE_LINE = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_BETWEEN_KEYS = re.compile(r"[=\[\]{},#\n]")
_DEEP = "is nested too deeply"
_LONG = f"must be a number of at most {MOST_DIGITS} digits"


def read_bounded(path: Path, most: int, *, encoding: str = "utf-8") -> str:
    """Text of a file of at most `most` characters: reading a device or another kind of file would fill memory before parsing.
    Raises OSError and UnicodeDecodeError."""
    with path.open(encoding=encoding) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise OSError(errno.EFBIG, f"Holds more than {most:,} letters, so is another kind of file", str(path))
    return text


def parse_json(text: str | bytes) -> Any:
    """Value of a JSON text. Raises ValueError (JSONDecodeError if there is a line to name) for any other text."""
    return _parsed(lambda source: json.loads(source, parse_int=_whole_number), text)


def parse_toml(text: str) -> dict[str, Any]:
    """Tables of a TOML text. Raises ValueError (TOMLDecodeError if there is a line to name) for any other text, and for keys of
    hundreds of parts: the standard library stores every prefix of a key, in memory that grows quadratically."""
    if any(part.count(".") > MOST_KEY_PARTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(_DEEP)
    values = _parsed(tomllib.loads, text)
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        key, node = waiting.pop()
        if isinstance(node, int) and abs(node) >= 10**MOST_DIGITS:
            raise ValueError(f"{key} {_LONG}")
        if isinstance(node, dict):
            waiting += [(f"{key}.{name}" if key else name, value) for name, value in node.items()]
        elif isinstance(node, list):
            waiting += [(key, value) for value in node]
    return values


def line_of(error: ValueError, where: object) -> str:
    """`where:line`, if the error from `parse_json` has a line."""
    return f"{where}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(where)


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"{digits[:10]}... {_LONG}")
    return int(digits)


def _parsed(parse: Callable[[Any], Any], text: Any) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(_DEEP) from None


def key_lines(text: str) -> dict[str, int]:
    """Line number of each dotted key in a TOML text. Good enough for error messages: it reads line by line, without the
    grammar."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if match := _TABLE_LINE.fullmatch(line.rstrip()):
            table = _plain(match[1]) + "."
            lines.setdefault(table[:-1], number)
        elif match := _KEY_LINE.match(line):
            lines.setdefault(table + _plain(match[1]), number)
    return lines


def _plain(key: str) -> str:
    return ".".join(part.strip().strip('"') for part in key.split("."))
