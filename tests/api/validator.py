"""JSON Schema as far as ours use it (draft 2020-12), for tests: what is wrong with a value, a line each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from write_schemas import schema_of

from ultrascale.api.stamp import VERSIONS

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),), "integer": (int,),
    "number": (int, float),
}  # fmt: skip
KNOWN = {
    "$schema", "$id", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "items", "enum",
    "additionalProperties", "const", "anyOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern",
}  # fmt: skip


def wrong(document: Any) -> list[str]:
    """What a document, or each of a list's or of a dictionary's, has that its schema does not allow."""
    if isinstance(document, list):
        return [one for item in document for one in wrong(item)]
    if "schema" not in document:
        assert document
        return [one for item in document.values() for one in wrong(item)]
    name, version = document["schema"].removeprefix("ultrascale/").split("/")
    assert VERSIONS[name] == int(version)
    return mistakes(document, schema_of(name))


def mistakes(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None, at: str = "$") -> list[str]:
    """Everything in `value` that `schema` does not allow."""
    return list(_mistakes(value, schema, root or schema, at))


def _mistakes(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str) -> Iterator[str]:
    assert set(schema) <= KNOWN, f"this validator does not know {set(schema) - KNOWN}"
    if "$ref" in schema:
        yield from _mistakes(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, at)
    if "anyOf" in schema and all(mistakes(value, one, root, at) for one in schema["anyOf"]):
        yield f"{at}: {value!r:.60} is none of {len(schema['anyOf'])} choices: {mistakes(value, schema['anyOf'][0], root, at)}"
    if "const" in schema and value != schema["const"]:
        yield f"{at}: {value!r:.60} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{at}: {value!r:.60} is not in {schema['enum']}"
    named = schema.get("type", [])
    kinds = tuple(kind for name in ([named] if isinstance(named, str) else named) for kind in TYPES[name])
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        yield f"{at}: {value!r:.60} is no {schema['type']}"
        return
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{at}: {value!r:.60} does not match {schema['pattern']}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _out_of_range(value, schema, at)
    if isinstance(value, list) and "items" in schema:
        for number, one in enumerate(value):
            yield from _mistakes(one, schema["items"], root, f"{at}[{number}]")
    if isinstance(value, dict):
        yield from (f"{at}: {key} is missing" for key in schema.get("required", ()) if key not in value)
        for key, one in value.items():
            inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
            if inner is False:
                yield f"{at}: {key} is unknown"
            elif inner is not True:
                yield from _mistakes(one, inner, root, f"{at}.{key}")


def _out_of_range(value: float, schema: dict[str, Any], at: str) -> Iterator[str]:
    low, high = schema.get("minimum", value), schema.get("maximum", value)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if not low <= value <= high or (above is not None and value <= above) or (below is not None and value >= below):
        yield f"{at}: {value} is out of range"
