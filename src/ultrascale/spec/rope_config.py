"""Rotary positions in `config.json`: `rope_theta` and `rope_scaling`, or the `rope_parameters` of transformers 5."""

from __future__ import annotations

import math
from typing import Any

from ultrascale.spec.model import Model, RopeScaling
from ultrascale.spec.problems import Problem

_KEYS = {
    "llama3": {"low_freq_factor": float, "high_freq_factor": float},
    "yarn": {"beta_fast": float, "beta_slow": float, "attention_factor": float},
}
_REMEDY = "Choose a model with plain, llama3 or yarn rotary positions."


def read_rope(
    config: dict[str, Any], default_theta: float, positions: int, where: str
) -> tuple[float, RopeScaling | None, list[Problem]]:
    """Theta and scaling of a config; `positions` is its `max_position_embeddings`, the default of the original length."""
    problems: list[Problem] = []

    def refuse(key: str, rule: str) -> None:
        problems.append(Problem(key, rule, _REMEDY, where))

    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    key = "rope_scaling" if old else "rope_parameters"
    if old and new and old != new:
        refuse("rope_scaling", "says something else than rope_parameters")
    rope = old or new or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        refuse(key, "must be one table for all layers")
        return default_theta, None, problems
    rope = dict(rope)
    written = rope.pop("rope_theta", config.get("rope_theta"))
    theta = default_theta if written is None else _positive(written)
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    for place, value in (
        ("partial_rotary_factor", config.get("partial_rotary_factor")),
        (key, rope.pop("partial_rotary_factor", 1)),
    ):
        if value not in (None, 1, 1.0):
            refuse(place, f"partial_rotary_factor = {value!r} is not supported: all dimensions of a head turn")
    if theta is None:
        refuse("rope_theta", f"must be a positive number, is {written!r}")
        theta = default_theta
    if kind in (None, "default"):
        _refuse_rest(rope, f"{key} of type 'default'", refuse)
        return theta, None, problems
    if not isinstance(kind, str) or kind not in _KEYS:
        refuse(f"{key}.rope_type", f"{kind!r} is not supported; supported are default, llama3, yarn")
        return theta, None, problems
    scaling = _read_scaling(kind, rope, positions, key, refuse)
    return theta, scaling, problems


def write_rope(model: Model) -> dict[str, Any]:
    """The old form, which transformers 4 and 5 both read."""
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    names = ["rope_type", "factor", "original_max_position_embeddings", *_KEYS[scaling.rope_type]]
    values = {name: getattr(scaling, name) for name in names}
    return {"rope_theta": model.rope_theta, "rope_scaling": {k: v for k, v in values.items() if v is not None}}


def _read_scaling(kind: Any, rope: dict[str, Any], positions: int, key: str, refuse) -> RopeScaling | None:
    values: dict[str, Any] = {"original_max_position_embeddings": rope.pop("original_max_position_embeddings", positions)}
    if not isinstance(values["original_max_position_embeddings"], int):
        refuse(f"{key}.original_max_position_embeddings", "must be a whole number")
        return None
    names = ["factor", *_KEYS[kind]]
    required = {"factor", *_KEYS["llama3"]} if kind == "llama3" else {"factor"}
    for name in names:
        value = rope.pop(name, None)
        if value is None and name not in required:
            continue
        number = values[name] = _positive(value)
        if number is None:
            refuse(f"{key}.{name}", f"must be a positive number, is {value!r}")
            return None
    if rope.get("truncate") is True:  # yarn's default
        del rope["truncate"]
    _refuse_rest(rope, f"{key} of type {kind!r}", refuse)
    return RopeScaling(kind, **values)


def _refuse_rest(rope: dict[str, Any], place: str, refuse) -> None:
    for name, value in rope.items():
        if value is not None:
            refuse(f"{place.split()[0]}.{name}", f"is not known in a {place}, so its effect would be lost")


def _positive(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return float(value) if number else None
