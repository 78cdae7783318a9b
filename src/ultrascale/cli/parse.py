"""A verb's function as its command line: positional words, flags and help come from the signature and its docstring."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

T = TypeVar("T")
_CONFIG = (tyro.conf.FlagCreatePairsOff,)


def parse(verb: Callable[..., T] | Any, name: str, arguments: list[str]) -> T:
    """Call `verb` (a function, a dataclass, or a choice of them) with `arguments` and return what it returns.

    Wrong ones end the process with exit code 2.
    """
    _say_what_to_give(verb)
    return tyro.cli(verb, prog=f"ultrascale {name}", args=arguments, config=_CONFIG)


def parse_with_overrides(verb: Callable[..., T], name: str, arguments: list[str]) -> tuple[T, list[str]]:
    """The same, and the words it did not know: dotted settings of a run, which `spec.resolve` reads and checks."""
    _say_what_to_give(verb)
    result: Any = tyro.cli(verb, prog=f"ultrascale {name}", args=arguments, return_unknown_args=True, config=_CONFIG)
    return result


def _say_what_to_give(verb: Any) -> None:
    """Let the help of a setting that may be left out say what to give, `INT`, and not `{None}|INT ... (default: None)`.

    Changes the annotations of `verb`, which are there for its command line.
    """
    if get_origin(verb) in (Union, UnionType):
        for one in get_args(verb):
            _say_what_to_give(one)
        return
    for name, hint in get_type_hints(verb, include_extras=True).items():
        if name in (settings := signature(verb).parameters) and settings[name].default in (None, "", ()):
            given = [kind for kind in get_args(hint) if kind is not NoneType]
            is_plain = get_origin(hint) in (Union, UnionType) and len(given) == 1 and isinstance(given[0], type)
            metavar = given[0].__name__.upper() if is_plain else None
            verb.__annotations__[name] = Annotated[hint, tyro.conf.arg(help_behavior_hint="", metavar=metavar)]
