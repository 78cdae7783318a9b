"""Reference of all configuration keys, one line each: type, unit, default, allowed values, and description. Generated from the
dataclasses of a run, their docstrings and `config.ranges`; `ultrascale show keys` and docs/reference.md print it.

The description of a key is in its docstring below the field and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ultrascale.config.choices import without_none
from ultrascale.config.ranges import MOST, limits_of
from ultrascale.config.schema import BYTE_KEYS, ELSEWHERE, LENGTH_KEYS, TOKEN_KEYS, leaves
from ultrascale.description.run import Run
from ultrascale.description.sections.launch import Launch

STAND_INS = {
    "model.preset": ("text", "Preset of a known model (`ultrascale show models`)."),
    "model.path": ("text", "Hugging Face folder, or its config.json, that defines the model."),
    "batch.tokens_per_batch": ("whole number", "Global batch size in tokens, such as \"4M\"; replaces `sequences_per_batch`."),
    "extends": ("text", "Another TOML file, whose values apply to keys that this file omits; relative to this file."),
}  # fmt: skip
"""Keys that stand for others, with their type and description."""
UNITS = {
    "tokens": (*TOKEN_KEYS, *LENGTH_KEYS),
    "sequences": ("sequences_per_batch", "micro_batch_size", "sequences"),
    "steps": ("steps", "keep_every_steps"),
    "islands": ("count",),
    "ranks": ("dp", "dp_shard", "tp", "cp", "cp_heads", "pp", "ep", "expert_tp"),
    "layers": ("num_hidden_layers", "max_window_layers", "first_k_dense_replace", "layers_per_bucket", "recompute_every"),
    "bytes": BYTE_KEYS,
}
ENDINGS = {"_seconds": "seconds", "_steps": "steps", "_bytes": "bytes", "_tokens": "tokens"}
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True)
class Key:
    """A configuration key."""

    key: str
    """Dotted name: `layout.dp` is `dp` in the table [layout], and `--layout.dp` on a command line."""
    kind: str
    """`whole number`, `text`, ..."""
    unit: str
    """`tokens`, `seconds`, ...; empty if it has none."""
    default: str
    """Default as written in TOML; empty if the key is required, or stands for other keys."""
    allowed: str
    """Choices, or a range; empty if every value of the type is allowed."""
    about: str
    """Description, on one line."""


def keys(word: str = "") -> list[Key]:
    """All keys in order, or those whose name, or whose name in another framework, contains `word`; if there are none, those
    whose description contains it."""
    all_keys = [_stand_in(key) for key in ("extends", "model.preset", "model.path")]
    for leaf_key in leaves():
        all_keys.append(_of_leaf(leaf_key))
        if leaf_key == "batch.sequences_per_batch":
            all_keys.append(_stand_in("batch.tokens_per_batch"))
    word = word.lower().replace("-", "_").removeprefix("__")
    meant = ELSEWHERE.get(word)
    return [key for key in all_keys if word in key.key or key.key == meant] or [
        key for key in all_keys if word in key.about.lower()
    ]


def about() -> dict[str, str]:
    """Description of each key and table of a run and of `[launch]`, by dotted name."""
    launch = {"launch": (Launch.__doc__ or "").partition("\n")[0]}
    return {**dict(_about(Run, "")), **launch, **dict(_about(Launch, "launch."))}


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Values of a type that is a choice; empty for any other."""
    inner = without_none(kind)
    return get_args(inner) if get_origin(inner) is Literal else ()


def _of_leaf(key: str) -> Key:
    leaf = leaves()[key]
    inner, choices, limits = without_none(leaf.kind), choices_of(leaf.kind), limits_of(key)
    allowed = ", ".join(map(str, choices)) or _range(limits)
    return Key(key, _kind(inner), _unit(key, inner), _default(leaf.default), allowed, about().get(key, ""))


def _stand_in(key: str) -> Key:
    kind, what = STAND_INS[key]
    return Key(key, kind, "tokens" if key.endswith("tokens_per_batch") else "", "", "", what)


def _about(kind: Any, prefix: str) -> Iterator[tuple[str, str]]:
    hints, docs = get_type_hints(kind), docs_of(kind)
    for field in fields(kind):
        inner = without_none(hints[field.name])
        if is_dataclass(inner):
            yield prefix + field.name, (inner.__doc__ or "").partition("\n")[0]
            yield from _about(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, docs.get(field.name, "")


def _kind(inner: Any) -> str:
    if get_origin(inner) is tuple:
        item = get_args(inner)[0]
        if is_dataclass(item):
            return f"list of tables with {', '.join(field.name for field in fields(item))}"
        inside = _kind(without_none(item))
        return f"list of {inside}" if inside == "text" else f"list of {inside}s"
    return "choice" if get_origin(inner) is Literal else KINDS.get(inner, "text")


def _unit(key: str, inner: Any) -> str:
    last = key.rpartition(".")[2]
    if inner not in (int, float):
        return ""
    named = next((unit for unit, names in UNITS.items() if last in names), "")
    return named or next((unit for ending, unit in ENDINGS.items() if last.endswith(ending)), "")


def _default(value: Any) -> str:
    if value is MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_default, value)) + "]"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def _range(limits: dict[str, float]) -> str:
    """`1 to 2048`, `at least 0`, `above 0, at most 2e+06`."""
    low, high = limits.get("minimum"), limits.get("maximum")
    if high is not None and high >= MOST:
        high = None
    if low is not None and high is not None and "exclusiveMaximum" not in limits:
        return f"{low:,} to {high:,}"
    words = [f"above {limits['exclusiveMinimum']}"] if "exclusiveMinimum" in limits else []
    words += [f"at least {low}"] if low is not None else []
    words += [f"below {limits['exclusiveMaximum']}"] if "exclusiveMaximum" in limits else []
    words += [f"at most {high:,.0f}"] if high is not None else []
    return ", ".join(words)


@cache
def docs_of(kind: Any) -> dict[str, str]:
    """Docstring of each field that has one, by field name, joined into one line."""
    body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            docs[field.target.id] = " ".join(inspect.cleandoc(below.value.value).split())  # type: ignore[union-attr]
    return docs
