"""Reads the families of `catalogue/models.toml`: a row of sizes for each model, what all have in common, and what some have
apart. Unknown and missing fields raise SpecError with the file, the table and the key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ultrascale.catalogue.tables import Entry, entries
from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.problems import Problem, SpecError, did_you_mean, mistake

_FAMILY = ("columns", "sizes", "common", "differences")
_MODEL = tuple(field.name for field in fields(Model) if field.name != "name")
_NEEDED = ("hidden_size", "num_attention_heads")
"""Columns that every family has: other fields follow from them."""
_SCALING = tuple(field.name for field in fields(RopeScaling))


def read_models(file: str, families: Mapping[str, Any]) -> dict[str, Model]:
    """The models of all families of a file, by name. Raises SpecError."""
    models = [(family, model) for _, family in entries(file, families, *_FAMILY) for model in _models_of(family)]
    by_name = {model.name: model for _, model in models}
    for family, model in models:
        if by_name[model.name] is not model:
            raise mistake(f"{family.where}.sizes", f"{model.name} is there twice", "Drop one.")
    return by_name


def read_aliases(file: str, aliases: Mapping[str, Any], models: Mapping[str, Model]) -> dict[str, str]:
    """Other names of `models`. Raises SpecError for one of a model that is not there, or that is a model's own name."""
    for alias, name in aliases.items():
        if name not in models or alias in models:
            rule = f"is {name!r}, which is no model's name" if name not in models else "is the name of a model itself"
            raise mistake(f"{file}: aliases.{alias}", rule, "Name a model of `sizes`." if name not in models else "Drop it.")
    return dict(aliases)


def _models_of(family: Entry) -> Iterator[Model]:
    columns = family.get("columns", list)
    _expect_fields(Entry(f"{family.where}.columns", dict.fromkeys(columns)), _MODEL)
    for column in _NEEDED:
        if columns.count(column) != 1:
            raise mistake(f"{family.where}.columns", f"has {column} {columns.count(column)} times", "Give it once.")
    lines = [line for line in family.get("sizes", str).splitlines() if line.strip()]
    rows = [(name, numbers) for name, *numbers in map(str.split, lines)]
    common = Entry(f"{family.where}.common", family.get("common", dict, {}))
    _expect_fields(common, _MODEL)
    differences = [
        Entry(f"{family.where}.differences[{place}]", table) for place, table in enumerate(family.get("differences", list, []))
    ]
    chosen = [(_models_named(entry, [name for name, _ in rows]), entry) for entry in differences]
    for name, numbers in rows:
        where = f"{family.where}.sizes: {name}"
        values = _sizes(where, columns, numbers) | dict(common.values)
        for names, entry in chosen:
            if name in names:
                values |= {key: value for key, value in entry.values.items() if key != "models"}
        try:
            if "rope_scaling" in values:
                values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
            yield Model(name=name, **values)
        except TypeError as error:
            raise mistake(where, f"is no model: {error}", "Give these fields, as the other families do.") from None


def _models_named(entry: Entry, members: list[str]) -> set[str]:
    """Models of the family that a table of differences is for; its other keys are fields of a model."""
    patterns = entry.get("models", list)
    _expect_fields(entry, ("models", *_MODEL))
    if isinstance(scaling := entry.values.get("rope_scaling", {}), dict):
        _expect_fields(Entry(f"{entry.where}.rope_scaling", scaling), _SCALING)
    names: set[str] = set()
    for pattern in patterns:
        start = pattern.removesuffix("*")
        matches = {name for name in members if (name == pattern if pattern == start else name.startswith(start))}
        if not matches:
            raise mistake(f"{entry.where}.models", f"{pattern!r} is the name of no model of this family", "Correct it.")
        names |= matches
    return names


def _sizes(where: str, columns: list[str], numbers: list[str]) -> dict[str, Any]:
    """The fields of a model that a row gives, and those that usually follow from them."""
    if len(numbers) != len(columns):
        raise mistake(where, f"has {len(numbers)} numbers for {len(columns)} columns", "Give one for each.")
    try:
        values: dict[str, Any] = {
            column: int(text) if text.isdigit() else float(text) for column, text in zip(columns, numbers, strict=True)
        }
    except ValueError as error:
        raise mistake(where, f"is not all numbers: {error}", "Correct it.") from None
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    return {"intermediate_size": 4 * hidden, "num_key_value_heads": heads, "head_dim": hidden // heads} | values


def _expect_fields(entry: Entry, known: tuple[str, ...]) -> None:
    """Raises SpecError for keys that are none of `known`, each with the most similar one."""
    problems = []
    for key in entry.values:
        if key not in known:
            remedy = did_you_mean(key, known, "The fields are those of description/architecture/model.py.")
            problems.append(Problem(f"{entry.where}.{key}", "is no field of a model", remedy))
    if problems:
        raise SpecError(problems)
