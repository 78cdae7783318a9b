"""RoPE in `config.json`: `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ultrascale.description.architecture.families import FAMILIES
from ultrascale.description.architecture.model import Model, RopeScaling
from ultrascale.description.problems import Problem

_KEYS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    "linear": (),
}
# Keys of yarn that only some families read.
_FAMILY_KEYS = {"deepseek_v2": ("mscale", "mscale_all_dim"), "deepseek_v3": ("mscale", "mscale_all_dim")}
_UNROUNDED = ("gpt_oss",)
_REMEDY = "Choose a model with plain, llama3, yarn or linear rotary positions."


@dataclass(frozen=True)
class Rope:
    """RoPE settings of a config, and the problems found in them."""

    theta: float
    scaling: RopeScaling | None
    partial_factor: float
    problems: list[Problem]


def read_rope(config: dict[str, Any], default_theta: float, positions: int, where: str) -> Rope:
    """RoPE settings of a config; `positions` is its `max_position_embeddings`, the default of the original length."""
    problems: list[Problem] = []
    family = config["model_type"]
    turns_partly = "partial_rotary_factor" not in FAMILIES[family].fixed
    partial = FAMILIES[family].defaults.get("partial_rotary_factor", 1.0)

    def refuse(key: str, rule: str) -> None:
        problems.append(Problem(key, rule, _REMEDY, where))

    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    key = "rope_scaling" if old else "rope_parameters"
    if old and new and old != new:
        refuse("rope_scaling", "says something else than rope_parameters")
    rope = old or new or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        refuse(key, "must be one table for all layers")
        return Rope(default_theta, None, partial, problems)
    rope = dict(rope)
    written = rope.pop("rope_theta", config.get("rope_theta"))
    theta = default_theta if written is None else _positive(written)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    for place, value in (
        ("partial_rotary_factor", config.get("partial_rotary_factor")),
        (key, rope.pop("partial_rotary_factor", None)),
    ):
        if value is not None and turns_partly:
            partial = _positive(value) or partial
        elif value not in (None, 1, 1.0):
            refuse(place, f"partial_rotary_factor = {value!r} is not supported: all dimensions of a head turn")
    if theta is None:
        refuse("rope_theta", f"must be a positive number, is {written!r}")
        theta = default_theta
    if kind in (None, "default"):
        _refuse_rest(rope, f"{key} of type 'default'", refuse)
        return Rope(theta, None, partial, problems)
    if not isinstance(kind, str) or kind not in _KEYS:
        refuse(f"{key}.rope_type", f"{kind!r} is not supported; supported are default, llama3, yarn, linear")
        return Rope(theta, None, partial, problems)
    scaling = _read_scaling(kind, rope, positions, key, family, refuse)
    return Rope(theta, scaling, partial, problems)


def write_rope(model: Model) -> dict[str, Any]:
    """The older form, which transformers 4 and 5 both read."""
    scaling = model.rope_scaling
    if scaling is None:  # if the family's default is another, "none" must be explicit
        plain = {"rope_type": "default"} if model.model_type in _UNROUNDED else None
        return {"rope_theta": model.rope_theta, "rope_scaling": plain}
    length = () if scaling.rope_type == "linear" else ("original_max_position_embeddings",)
    names = ["rope_type", "factor", *length, *_KEYS[scaling.rope_type]]
    names += _FAMILY_KEYS.get(model.model_type, ())
    values = {name: getattr(scaling, name) for name in names} | ({} if scaling.truncate else {"truncate": False})
    return {"rope_theta": model.rope_theta, "rope_scaling": {k: v for k, v in values.items() if v is not None}}


def _read_scaling(kind: Any, rope: dict[str, Any], positions: int, key: str, family: str, refuse) -> RopeScaling | None:
    values: dict[str, Any] = {"original_max_position_embeddings": rope.pop("original_max_position_embeddings", positions)}
    if not isinstance(values["original_max_position_embeddings"], int):
        refuse(f"{key}.original_max_position_embeddings", "must be a whole number")
        return None
    names = ["factor", *_KEYS[kind], *(_FAMILY_KEYS.get(family, ()) if kind == "yarn" else ())]
    required = {"factor", *_KEYS["llama3"]} if kind == "llama3" else {"factor"}
    for name in names:
        value = rope.pop(name, None)
        if value is None and name not in required:
            continue
        number = values[name] = _positive(value)
        if number is None:
            refuse(f"{key}.{name}", f"must be a positive number, is {value!r}")
            return None
    if rope.get("truncate") is True or (rope.get("truncate") is False and family in _UNROUNDED):  # True is yarn's default
        values["truncate"] = rope.pop("truncate")
    _refuse_rest(rope, f"{key} of type {kind!r}", refuse)
    return RopeScaling(kind, **values)


def _refuse_rest(rope: dict[str, Any], place: str, refuse) -> None:
    for name, value in rope.items():
        if value is not None:
            refuse(f"{place.split()[0]}.{name}", f"is not known in a {place}, so its effect would be lost")


def _positive(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if number else None
