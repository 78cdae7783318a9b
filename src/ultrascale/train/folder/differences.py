"""Differences between the facts of a run stored in its folder and the current ones.

A release adds fields, each with a default that keeps the behaviour of earlier releases. So a key that was not stored has its
default: a run resumes under a newer release, and reuses its earlier choices.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")


def with_defaults(item: Item) -> Item:
    """The dataclass `item` and its nested dataclasses, with every field that has a default set to it."""
    values = {}
    for field in fields(item):  # pyright: ignore[reportArgumentType]
        value = getattr(item, field.name)
        if is_dataclass(value):
            values[field.name] = with_defaults(value)
        elif field.default is MISSING and field.default_factory is MISSING:
            values[field.name] = value
    return type(item)(**values)


def differences(before: Any, now: Any, defaults: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Keys with their values before and now, where these differ. All three are plain data of one form; a key that is missing
    from `before` takes its value from `defaults`."""
    if isinstance(before, dict) and isinstance(now, dict):
        other = defaults if isinstance(defaults, dict) else {}
        keys = sorted(before.keys() | now.keys())
        return [
            difference
            for k in keys
            for difference in differences(before.get(k, other.get(k)), now.get(k), other.get(k), f"{key}.{k}".lstrip("."))
        ]
    return [] if before == now else [(key, before, now)]
