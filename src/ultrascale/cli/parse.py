"""A verb's function as its command line: positional words, flags and help come from the signature and its docstring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tyro

T = TypeVar("T")
_CONFIG = (tyro.conf.FlagCreatePairsOff,)


def parse(verb: Callable[..., T] | Any, name: str, arguments: list[str]) -> T:
    """Call `verb` (a function, a dataclass, or a choice of them) with `arguments` and return what it returns.

    Wrong ones end the process with exit code 2.
    """
    return tyro.cli(verb, prog=f"ultrascale {name}", args=arguments, config=_CONFIG)


def parse_with_overrides(verb: Callable[..., T], name: str, arguments: list[str]) -> tuple[T, list[str]]:
    """The same, and the words it did not know: dotted settings of a run, which `spec.resolve` reads and checks."""
    result: Any = tyro.cli(verb, prog=f"ultrascale {name}", args=arguments, return_unknown_args=True, config=_CONFIG)
    return result
