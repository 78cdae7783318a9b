"""Write the JSON Schemas (draft 2020-12) of the package, such as `schemas/plan-2.json`: of verbs' output (`schema_documents`),
and of run.toml. A test checks that they are up to date."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from schema_documents import DOCUMENTS

from ultrascale.api.stamp import FOLDER, RUN_TOML, SCHEMA_NAMES, VERSIONS, plain, schema_file
from ultrascale.config.choices import without_none
from ultrascale.config.ranges import limits_of
from ultrascale.config.reference import STAND_INS, about, docs_of
from ultrascale.config.schema import TIMES, UNITS, default_of, leaves, sections
from ultrascale.description.run import RampStage

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string"}
COUNT, TIME = "^[0-9][0-9_,.]* *(k|K|M|B|T|Ki|Mi|Gi|Ti)$", "^([0-9]+ *(d|h|m|min|s) *)+$"
"""Numbers with units in text."""


def schema_of(name: str) -> dict[str, Any]:
    """Schema of one document, or of run.toml."""
    return _run_toml() if name == RUN_TOML else _document(name)


def _document(name: str) -> dict[str, Any]:
    stamp = f"ultrascale/{name}/{VERSIONS[name]}"
    head: dict[str, Any] = {"$schema": DIALECT, "$id": stamp}
    defs: dict[str, Any] = {}
    parts = [_object(kind, defs) for kind in DOCUMENTS[name]]
    schema = parts[0] | {
        "properties": {key: subschema for part in parts for key, subschema in part["properties"].items()},
        "required": [key for part in parts for key in part["required"]],
        "$defs": defs,
    }
    schema["properties"] = {"schema": {"const": stamp}, **schema["properties"]}
    schema["required"] = ["schema", *schema["required"]]
    return head | schema


def _object(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """Schema of a dataclass or typed dictionary, every key with its description; no other keys are allowed."""
    hints = get_type_hints(kind)
    optional = kind.__optional_keys__ if is_typeddict(kind) else frozenset()
    docs: dict[str, str] = {}
    for base in reversed([base for base in (kind, *getattr(kind, "__orig_bases__", ())) if is_typeddict(base) or base is kind]):
        docs |= docs_of(base) if _has_source(base) else {}
    described = {name: {"description": docs[name]} for name in hints if docs.get(name)}
    properties = {name: _of(hint, defs) | described.get(name, {}) for name, hint in hints.items()}
    about = (kind.__doc__ or "").strip().partition("\n")[0]
    head = {"description": about} if about and not about.startswith("dict(") else {}
    required = [name for name in hints if name not in optional]
    return head | {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _has_source(kind: Any) -> bool:
    """True if the type is written as a class; a typed dictionary with a key such as `from` is written as a call."""
    try:
        return inspect.getsource(kind).lstrip().startswith(("class", "@"))
    except (OSError, TypeError):
        return False


def _of(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """Schema of a type; classes are defined once, in `defs`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind in (NoneType, None):
        return {"type": "null"}
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [_of(member, defs) for member in inner]}
    if origin in (list, tuple):
        return {"type": "array", "items": _of(inner[0], defs)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(inner[1], defs)}
    assert is_dataclass(kind) or is_typeddict(kind), kind
    name: str = kind.__qualname__  # type: ignore[union-attr]
    if name not in defs:
        defs[name] = {}
        defs[name] = _object(kind, defs)
    return {"$ref": f"#/$defs/{name}"}


def _run_toml() -> dict[str, Any]:
    """Schema of a run's TOML file: nested tables, every key with its description, its range or choices, and its default."""
    root: dict[str, Any] = {
        "$schema": DIALECT, "$id": RUN_TOML, "title": "A run of ultrascale", "type": "object", "properties": {},
        "additionalProperties": False,
    }  # fmt: skip
    descriptions = about()
    tables = {"": root}
    for section in sorted(sections()):
        above, _, last = section.rpartition(".")
        table = {"type": "object", "properties": {}, "additionalProperties": False, "description": descriptions[section]}
        tables[section] = tables[above]["properties"][last] = table
    tables["model"]["properties"]["rope_scaling"] = {"anyOf": [tables["model.rope_scaling"], {"const": "none"}]}
    for key, leaf in leaves().items():
        section, _, last = key.rpartition(".")
        default = {} if leaf.default in (MISSING, None) else {"default": plain(leaf.default)}
        tables[section]["properties"][last] = _toml_value(key, leaf.kind) | {"description": descriptions[key]} | default
    for key, (_, what) in STAND_INS.items():
        section, _, last = key.rpartition(".")
        tokens = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}
        kind = tokens if key == "batch.tokens_per_batch" else {"type": "string"}
        tables[section]["properties"][last] = kind | {"description": what}
    return root


def _toml_value(key: str, kind: Any) -> dict[str, Any]:
    """Schema of a value in TOML: "none" for nothing, "4M" for tokens and counts, "128k" for lengths, "20GiB" for bytes, "30m"
    for times; tables in lists."""
    if (inner := without_none(kind)) is not kind:
        return {"anyOf": [_toml_value(key, inner), {"const": "none"}]}
    if get_origin(kind) is tuple:
        return {"type": "array", "items": _toml_value(f"{key}[]", get_args(kind)[0])}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        properties = {name: _toml_value(f"{key}.{name}", hint) for name, hint in hints.items()}
        needed = [field.name for field in fields(kind) if default_of(field) is MISSING]
        table: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
        if kind is RampStage:
            properties["tokens_per_batch"] = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}
            return table | {"required": ["until_tokens"]}
        object_schema = table | {"required": needed}
        return {"anyOf": [{"type": "string"}, object_schema]} if hints[fields(kind)[0].name] is str else object_schema
    if kind is int and key.rpartition(".")[2] in UNITS:
        return {"anyOf": [{"type": "string"}, {"type": "integer"} | limits_of(key)]}
    number = _of(kind, {}) | limits_of(key)
    if kind is float and key.rpartition("_")[2] in TIMES:
        return number | {"type": ["number", "string"], "pattern": TIME}
    return number | {"type": ["integer", "string"], "pattern": COUNT} if kind is int else number


def text_of(name: str) -> str:
    """Text of a schema's file."""
    return json.dumps(schema_of(name), indent=1) + "\n"


def write() -> None:
    """Write all schemas into the package, and remove obsolete ones."""
    FOLDER.mkdir(exist_ok=True)
    texts = {schema_file(name): text_of(name) for name in SCHEMA_NAMES}
    for path in FOLDER.glob("*.json"):
        if path not in texts:
            path.unlink()
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    write()
