"""Validation of read data: a `Document`, or a `DataError` that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ultrascale.data.files import DataError

REPAIR = "Repair it, or leave such documents out with --on-bad skip."
OTHER_FIELD = "Name a field that holds text with --field (the messages of a chat are none), or use --on-bad skip."


@dataclass(frozen=True)
class Document:
    """One document, whole or as pieces of text that are read lazily (which may raise DataError)."""

    where: str
    key: str
    """Permanent name: file and place inside."""
    text: str | None
    pieces: Iterator[str] | None = None


def parse_line(line: bytes, where: str, field: str) -> Any:
    """The field's value in a line of JSON. Raises DataError if the line is not a JSON object with that field."""
    try:
        value = _DECODER.decode(line.decode("utf-8").lstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise invalid_utf8(where, error.start, error, "byte of the line") from error
    except RecursionError as error:
        raise DataError(where, "is nested too deeply", REPAIR, "broken_json") from error
    except ValueError as error:
        raise DataError(where, f"is not JSON: {error}", REPAIR, "broken_json") from error
    if not isinstance(value, dict):
        raise DataError(where, f"is {type(value).__name__}, expected a JSON object", REPAIR, "broken_json")
    if field not in value:
        problem = f"has no field {field!r}, only {', '.join(map(repr, list(value)[:8])) or 'none'}"
        raise DataError(where, problem, "Name the text's field with --field, or use --on-bad skip.", "missing_field")
    return value[field]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def judged(content: bytes, where: str, key: str, offset: int) -> Document | DataError:
    """The document in these bytes, which begin at byte `offset` of `where`."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return invalid_utf8(where, offset + error.start, error)
    return judged_text(text, where, key)


def judged_text(value: Any, where: str, key: str) -> Document | DataError:
    """The document in a value that should be text."""
    if not isinstance(value, str):
        kind, remedy = ("null", REPAIR) if value is None else (type(value).__name__, OTHER_FIELD)
        return DataError(where, f"the text is {kind}, expected a string", remedy, "not_text")
    if not value:
        return DataError(where, "the document is empty", REPAIR, "empty")
    try:
        return Document(where, key, judge_piece(value, where))
    except DataError as error:
        return error


def judge_piece(text: str, where: str) -> str:
    """Returns `text`. Raises DataError if it is not valid input for a tokenizer: a NUL, half a surrogate pair."""
    if (position := text.find("\0")) >= 0:
        raise DataError(where, f"has a NUL (U+0000) at character {position}, as binary data do", REPAIR, "nul")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"has half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}"
            raise DataError(where, problem, REPAIR, "lone_surrogate") from error
    return text


def invalid_utf8(where: str, at: int | None, error: UnicodeDecodeError, of: str = "byte") -> DataError:
    """The error for bytes that are not UTF-8, at position `at` if known."""
    place = "" if at is None else f", at {of} {at}"
    problem = f"is not UTF-8: {error.reason} (0x{error.object[error.start]:02x}){place}"
    return DataError(where, problem, f"Convert it to UTF-8. {REPAIR}", "invalid_utf8")
