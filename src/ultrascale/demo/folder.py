"""The folder that everything of the demo lands in: made, claimed, and cleared of an earlier demo, and of nothing else."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultrascale.description.problems import Problem, SpecError

MARK = ".ultrascale-demo"
MADE_AFRESH = ("run", "plots", "exported", "run.toml", "training.log", "summary.json")
"""Files of an earlier demo that this one makes again; the prepared text is kept."""


@contextmanager
def demo_folder(folder: Path) -> Iterator[None]:
    """`folder`, there and ours while inside. Raises SpecError if it is somebody else's, in use, or cannot be written."""
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).exists():
            raise _refused(f"{folder} holds other files, which the demo must not mix with", "Name another.")
        folder.mkdir(parents=True, exist_ok=True)
        mark = open(folder / MARK, "w")  # noqa: SIM115 (closed below: the lock lives as long as the file is open)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise _refused(f"{folder} cannot be written: {reason}", "Name another.") from None
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refused(f"another demo is using {folder}", "Wait for it, or name another.") from None
        _clear(folder)
        yield


def _refused(rule: str, remedy: str) -> SpecError:
    return SpecError([Problem("--folder", rule, remedy)])


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
