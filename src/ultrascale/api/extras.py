"""Packages that only some verbs need: which extra of the installation brings each, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

EXTRA_OF = {
    "torch": "train", "numpy": "train", "safetensors": "train", "tokenizers": "train",
    "pyarrow": "data", "zstandard": "data", "matplotlib": "plot",
}  # fmt: skip


class NotInstalledError(ImportError):
    """A package that only this needs is not installed; the text says which, and how to get it."""


def sentence_of(error: ModuleNotFoundError, verb: str) -> str:
    """Names the extra that `verb` lacks, and how to get it; empty if the module is none of an extra's."""
    package = (error.name or "").split(".")[0]
    if package not in EXTRA_OF:
        return ""
    return f"`ultrascale {verb}` needs {package}, which is not installed: pip install 'ultrascale[{EXTRA_OF[package]}]'"


@contextmanager
def naming_extras(verb: str) -> Iterator[None]:
    """While inside, a missing package of an extra is a NotInstalledError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if sentence := sentence_of(error, verb):
            raise NotInstalledError(sentence) from None
        raise
