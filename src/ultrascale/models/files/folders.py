"""Atomic folders: they appear complete or not at all, and replace only an earlier folder of their kind."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ultrascale.description.problems import Problem, SpecError
from ultrascale.output_file import make_durable


class FolderError(RuntimeError):
    """A folder could not be written: the disk is full, or permission is missing. Earlier contents are left in place."""

    def __init__(self, problem: Problem):
        super().__init__(str(problem))
        self.problems = (problem,)


@contextmanager
def fill_folder(folder: Path, *, is_ours: Callable[[str], bool], overwrite: bool, source: Path | None) -> Iterator[Path]:
    """Yield an empty folder to write into; on exit without an error it is synced to disk and renamed to `folder`.

    With `overwrite` an earlier folder is replaced, if `is_ours` accepts the names of all files in it. Folders and files follow
    the umask. Raises SpecError if `folder` must not be replaced or created, and FolderError for errors of the disk.
    """
    folder = folder.resolve()
    expect_replaceable(folder, is_ours=is_ours, overwrite=overwrite, source=source)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # safetensors writes 0600, whatever the umask
            make_durable(file)
        make_durable(partial)
        _publish(partial, folder, is_ours)
    except (OSError, SafetensorError) as error:
        remedy = "Nothing was left behind. Free space, or choose another folder."
        raise FolderError(Problem(str(folder), f"cannot be written ({error})", remedy)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def expect_replaceable(folder: Path, *, is_ours: Callable[[str], bool], overwrite: bool, source: Path | None) -> None:
    """Raise SpecError if writing `folder` would destroy something other than an earlier folder of this kind that may be
    replaced."""
    refusal = _refusal(folder.resolve(), is_ours, overwrite, source)
    if refusal is not None:
        raise SpecError([refusal])


def _refusal(folder: Path, is_ours: Callable[[str], bool], overwrite: bool, source: Path | None) -> Problem | None:
    """Reason why `folder` must not be replaced: it holds something other than an earlier folder of this kind; else None."""
    if not folder.exists():
        return None
    remedy = "Choose another folder, or remove it first."
    if not folder.is_dir():
        return Problem(str(folder), "is a file, and only a folder can be replaced", remedy)
    rule = _place(folder) or (_overlap(folder, source.resolve()) if source is not None and overwrite else None)
    if rule is not None:
        return Problem(str(folder), rule, "Choose another folder.")
    names = sorted(os.listdir(folder))
    if names and not overwrite:
        return Problem(str(folder), "exists already", f"{remedy} --overwrite replaces an earlier export.")
    foreign = [name for name in names if not is_ours(name) or not _is_plain_file(folder / name)]
    if foreign:
        return Problem(str(folder), f"holds what no export writes ({', '.join(foreign[:3])}) and is not replaced", remedy)
    if names and not ("config.json" in names and any(name.endswith(".safetensors") for name in names)):
        return Problem(str(folder), "holds no config.json with weights, so it is no earlier export and is not replaced", remedy)
    return None


def _place(folder: Path) -> str | None:
    """The reason why the folder cannot be replaced, whatever it holds."""
    if os.path.ismount(folder):
        return "is a mount point, which cannot be replaced"
    if Path.cwd().is_relative_to(folder):
        return "is or contains the working folder, which is not replaced"
    if Path.home().resolve().is_relative_to(folder):
        return "is or contains the home folder, which is not replaced"
    return None


def _overlap(folder: Path, source: Path) -> str | None:
    if source.is_relative_to(folder):
        return f"is or contains the source {source}, which would be lost"
    if folder.is_relative_to(source):
        return f"lies inside the source {source}, of which nothing is replaced"
    return None


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _publish(partial: Path, folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Rename into place; an earlier folder is moved aside first, and removed last."""
    aside = partial.with_suffix(".replaced")
    replaces = folder.exists()
    if replaces:
        folder.rename(aside)
    try:
        partial.rename(folder)
    except OSError:
        if replaces:
            aside.rename(folder)
        raise
    make_durable(folder.parent)
    if replaces:
        _remove(aside, is_ours)


def _remove(aside: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove an earlier folder, file by file; files added meanwhile stay, and the folder with them."""
    for file in aside.iterdir():
        if is_ours(file.name) and _is_plain_file(file):
            file.unlink()
    if not any(aside.iterdir()):
        aside.rmdir()
