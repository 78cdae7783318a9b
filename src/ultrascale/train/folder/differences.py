"""Differences between facts of a run that are kept in its folder and those of now.

A release adds fields, each with the default that does as releases before it did. So a key that was not kept has its default:
a run goes on under a newer release, and takes again what was chosen for it.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


def with_defaults(item: Item) -> Item:
    """The dataclass `item`, and those in it, with the default of every field that has one."""
    values = {}
    for field in fields(item):  # pyright: ignore[reportArgumentType]
        value = getattr(item, field.name)
        if is_dataclass(value):
            values[field.name] = with_defaults(value)
        elif field.default is MISSING and field.default_factory is MISSING:
            values[field.name] = value
    return type(item)(**values)


def differences(before: Any, now: Any, defaults: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Keys with their values before and now, where these differ. All three are plain data of one form; a key that `before`
    lacks has its value in `defaults`."""
    if isinstance(before, dict) and isinstance(now, dict):
        other = defaults if isinstance(defaults, dict) else {}
        keys = sorted(before.keys() | now.keys())
        return [
            difference
            for k in keys
            for difference in differences(before.get(k, other.get(k)), now.get(k), other.get(k), f"{key}.{k}".lstrip("."))
        ]
    return [] if before == now else [(key, before, now)]
