"""Settings that are one of a few values, for a run that is read and for one that is built in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ultrascale.description.problems import Problem, expect_none
from ultrascale.description.run import Run


def without_none(kind: Any) -> Any:
    """A type without None."""
    members = [member for member in get_args(kind) if member is not NoneType]
    return members[0] if NoneType in get_args(kind) and len(members) == 1 else kind


def is_choice(value: Any, option: Any) -> bool:
    """True if `value` is `option`, of the same type: True is not 1."""
    return value == option and type(value) is type(option)


def choice_problem(key: str, value: Any, options: tuple[Any, ...], *, hint: str = "Choose one of them.") -> Problem:
    """Problem of a value that is none of `options`, with the nearest of them, or else `hint`."""
    nearest = _of_like_size(str(value), options) or get_close_matches(str(value), [str(option) for option in options], n=1)
    rule = f"must be one of {', '.join(map(repr, options))}, is {value!r}"
    return Problem(key, rule, f"Did you mean {nearest[0]!r}?" if nearest and nearest[0] != value else hint)


def choice_problems(section: Any, prefix: str = "") -> Iterator[Problem]:
    """Problems of all choices in `section`, a dataclass such as `Run` or `Model`, and in the sections inside it. `prefix`: of
    their keys, such as `model.`."""
    options = _choices(type(section))
    for field in fields(section):
        value, key = getattr(section, field.name), prefix + field.name
        if is_dataclass(value):
            yield from choice_problems(value, f"{key}.")
        elif field.name in options:
            for item in value if isinstance(value, tuple) else (value,):
                if not any(is_choice(item, option) for option in options[field.name]):
                    yield choice_problem(key, item, tuple(option for option in options[field.name] if option is not None))


def expect_choices(run: Run) -> None:
    """Raises SpecError with every choice of `run` that is none of its options."""
    expect_none([*choice_problems(run)])


@cache
def _choices(section: type) -> dict[str, tuple[Any, ...]]:
    """Options of each field that is a choice or a list of choices; None is one if the field may be None."""
    options = {}
    for name, kind in get_type_hints(section).items():
        kinds = [kind, *get_args(kind)]
        if literal := next((inner for inner in kinds if get_origin(inner) is Literal), None):
            options[name] = (*get_args(literal), *([None] if NoneType in kinds else []))
    return options


def _of_like_size(value: str, options: tuple[Any, ...]) -> list[str]:
    """At most one option: same letters as `value`, nearest number. For fp4 it is fp8 and not fp64."""
    parts = re.fullmatch(r"([a-z]+)(\d{1,4})", value)
    alike = [str(option) for option in options if parts and re.fullmatch(rf"{parts[1]}\d+", str(option))]
    return sorted(alike, key=lambda option: abs(int(option[len(parts[1]) :]) - int(parts[2])) if parts else 0)[:1]
