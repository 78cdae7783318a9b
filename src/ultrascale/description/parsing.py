"""JSON and TOML from untrusted sources. The standard library's parsers also raise RecursionError for deep nesting and a bare
ValueError for integers of thousands of digits, and return integers that no float can hold; here, every error in a text is a
ValueError.
"""

from __future__ import annotations

import errno
import json
import re
import tomllib
from collections.abc import Callable, Iterator
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


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice."""


def parse_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Value of a JSON text. Raises ValueError (JSONDecodeError if there is a line to name) for any other text; with
    `unique_keys`, RepeatedKeyError for an object with a key twice, of which the standard library keeps the last."""
    hook = _unique if unique_keys else None
    return _parsed(lambda source: json.loads(source, parse_int=_whole_number, object_pairs_hook=hook), text)


def parse_toml(text: str) -> dict[str, Any]:
    """Tables of a TOML text. Raises ValueError (TOMLDecodeError if there is a line to name) for any other text, and for keys of
    hundreds of parts: the standard library stores every prefix of a key, in memory that grows quadratically."""
    if any(part.count(".") > MOST_KEY_PARTS for part in _BETWEEN_KEYS.split(text)):
        raise ValueError(_DEEP)
    values = _parsed(_toml, text)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise RepeatedKeyError(f"{key} is there twice")
        values[key] = value
    return values


def _toml(text: str) -> dict[str, Any]:
    """As `tomllib.loads`, with the name of a key that is there twice."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"Cannot overwrite a value \(at line (\d+)", str(error))
        repeated = [(key, number) for key, number in _keys(text) if number <= int(line[1])] if line else []
        if repeated and (first := key_lines(text)[repeated[-1][0]]) < repeated[-1][1]:
            raise ValueError(f"{error}: {repeated[-1][0]} is there already, in line {first}") from None
        raise


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
    for key, number in _keys(text):
        lines.setdefault(key, number)
    return lines


def _keys(text: str) -> Iterator[tuple[str, int]]:
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if match := _TABLE_LINE.fullmatch(line.rstrip()):
            table = _plain(match[1]) + "."
            yield table[:-1], number
        elif match := _KEY_LINE.match(line):
            yield table + _plain(match[1]), number


def _plain(key: str) -> str:
    return ".".join(part.strip().strip('"') for part in key.split("."))
