"""Presets of known models, so that planning needs no network: `catalogue/models.toml`, with its sources."""

from __future__ import annotations

import math
from difflib import get_close_matches

from ultrascale.catalogue.models.model_names import normal_name, parameters_in_name
from ultrascale.catalogue.models.model_table import read_aliases, read_models
from ultrascale.catalogue.tables import read_tables
from ultrascale.description.architecture.model import Model
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


_FILE = "models.toml"
_TABLES = read_tables(_FILE)
_ALIASES = _TABLES.pop("aliases", {})
PRESETS: dict[str, Model] = read_models(_FILE, _TABLES)
ALIASES: dict[str, str] = read_aliases(_FILE, _ALIASES, PRESETS)
