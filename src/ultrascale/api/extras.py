"""Packages that only some verbs need: the extra that installs each, and the error message that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ultrascale.description.problems import Problem

EXTRA_OF = {
    "torch": "train", "numpy": "train", "safetensors": "train", "tokenizers": "train",
    "pyarrow": "data", "zstandard": "data", "matplotlib": "plot",
}  # fmt: skip


class NotInstalledError(ImportError):
    """A package of an optional extra is not installed; the message names it and how to install it."""

    def __init__(self, lacks: Problem):
        super().__init__(f"{lacks.key} {lacks.rule}: {lacks.remedy}")
        self.problems = (lacks,)


def lacks(who: str, package: str, *, remedy: str = "") -> Problem:
    """Problem: `who` needs a package that is not installed."""
    remedy = remedy or f"pip install 'ultrascale[{EXTRA_OF[package]}]'"
    return Problem(who, f"needs {package}, which is not installed", remedy)


def lacked(error: ModuleNotFoundError, verb: str) -> NotInstalledError | None:
    """The error that names the extra which `verb` needs; None if the module belongs to no extra."""
    package = (error.name or "").split(".")[0]
    return NotInstalledError(lacks(f"`ultrascale {verb}`", package)) if package in EXTRA_OF else None


@contextmanager
def naming_extras(verb: str) -> Iterator[None]:
    """Context manager that turns a missing package of an extra into a NotInstalledError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise lacked(error, verb) or error from None
