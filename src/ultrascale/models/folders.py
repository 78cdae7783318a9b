"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultrascale.spec.problems import Problem, SpecError


@contextmanager
def fill_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into; on leaving without an error it is synced to disk and renamed to `folder`.

    Raises SpecError if `folder` exists with something in it and `overwrite` is false.
    """
    folder = folder.absolute()
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError([Problem(str(folder), "exists already", "Choose another folder, or remove it first.")])
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        _publish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
    """Rename; what stood there before is moved aside first, and removed last."""
    aside = partial.with_suffix(".replaced")
    if folder.exists():
        folder.rename(aside)
    partial.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
