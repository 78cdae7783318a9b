"""The folder that everything of the demo lands in: made, claimed, and cleared of an earlier demo, and of nothing else."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultrascale.demo.claims import DemoError

MARK = ".ultrascale-demo"
MADE_AFRESH = ("run", "plots", "exported", "run.toml", "training.log", "summary.json")
"""Files of an earlier demo that this one makes again; the prepared text is kept."""


@contextmanager
def demo_folder(folder: Path) -> Iterator[None]:
    """`folder`, there and ours while inside. Raises DemoError if it is somebody else's, in use, or cannot be written."""
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
            raise DemoError(f"{folder} holds other files, which the demo must not mix with. Name another with --folder.")
        folder.mkdir(parents=True, exist_ok=True)
        mark = open(folder / MARK, "w")  # noqa: SIM115 (closed below: the lock lives as long as the file is open)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DemoError(f"cannot write into {folder}: {reason}. Name another folder with --folder.") from None
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another demo is using {folder}. Wait for it, or name another with --folder.") from None
        _clear(folder)
        yield


def forget_text(folder: Path) -> None:
    """Remove the prepared text, for when the library it was made from has changed."""
    shutil.rmtree(folder / "data", ignore_errors=True)


def _clear(folder: Path) -> None:
    for name in MADE_AFRESH:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
