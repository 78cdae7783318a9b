"""Presets of known models, so that planning needs no network: `catalogue/models.toml`, with its sources."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from ultrascale.catalogue.models.model_names import normal_name, parameters_in_name
from ultrascale.catalogue.tables import read_tables
from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.problems import mistake

NEAREST = 3
"""Number of names suggested for an unknown one."""


def preset(name: str) -> Model:
    """The model named `name`, in any common spelling (`catalogue.models.model_names`). Raises SpecError with the nearest
    names."""
    for key in (name.strip().lower(), normal_name(name)):
        key = ALIASES.get(key, key)
        if key in PRESETS:
            return PRESETS[key]
    raise mistake("model.preset", *_unknown(name))


def _unknown(name: str) -> tuple[str, str]:
    """Rule and remedy for an unknown name."""
    everything = "`ultrascale show models` lists them all."
    if "/" in name and (name.startswith((".", "/", "~")) or name.endswith((".json", "/"))):
        return f"there is no file or folder {name!r}", "Give a folder that holds a config.json, or a preset's name."
    if size := parameters_in_name(name):
        sizes = {
            model.name: num_parameters(model) for model in PRESETS.values() if not model.name.startswith(("tiny", "bench"))
        }
        similar = sorted(sizes, key=lambda key: abs(math.log(sizes[key] / size)))[:NEAREST]
        words = ", ".join(f"{key} ({sizes[key] / 1e9:.3g}B)" for key in similar)
        return f"{name!r} is a size, which many shapes have", f"Name one: {words}; or give a config.json. {everything}"
    key = normal_name(name)
    similar = get_close_matches(key, [*PRESETS, *ALIASES], n=NEAREST, cutoff=0.5)
    remedy = f"Did you mean {' or '.join(similar)}? " if similar else ""
    return f"there is no model called {name!r}", f"{remedy}Or give the folder of its config.json; {everything}"


def _models(family: Mapping[str, Any]) -> Iterator[Model]:
    """Models of one family, one per row of `sizes`."""
    for row in family["sizes"].splitlines():
        name, *numbers = row.split()
        fields: dict[str, Any] = dict(zip(family["columns"], map(_number, numbers), strict=True))
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        usual = {"intermediate_size": 4 * hidden, "num_key_value_heads": heads, "head_dim": hidden // heads}
        fields = usual | fields | family.get("common", {})
        for difference in family.get("differences", ()):
            if name.startswith(tuple(difference["of"])):
                fields |= difference
        fields = {field: None if value == "null" else value for field, value in fields.items() if field != "of"}
        if scaling := fields.get("rope_scaling"):
            fields["rope_scaling"] = RopeScaling(**scaling)
        yield Model(name=name, **fields)


def _number(text: str) -> float:
    return int(text) if text.isdigit() else float(text)


_TABLES = read_tables("models.toml")
ALIASES: dict[str, str] = _TABLES.pop("aliases")
PRESETS: dict[str, Model] = {model.name: model for family in _TABLES.values() for model in _models(family)}
