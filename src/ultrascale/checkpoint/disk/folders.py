"""Folders of checkpoints: publishing, replacing and removing them so that a kill at any instant leaves only complete ones.

    step-00000120                 a checkpoint: complete from the moment it has this name
    .step-00000120.tmp-1f2e3d4c   being written
    .step-00000120.old-1f2e3d4c   complete, moved aside while a new save of the same step is published; still a checkpoint
    .step-00000120.del-1f2e3d4c   being deleted

Publishing: files and manifest are fsynced, then the temporary folder, then it is renamed, then the root is fsynced.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from ultrascale.checkpoint.disk.files import is_understood, read_manifest, write_file
from ultrascale.checkpoint.disk.patience import rename
from ultrascale.checkpoint.errors import CheckpointError, UnknownVersionError
from ultrascale.failpoints import failpoint
from ultrascale.output_file import make_durable

_CHECKPOINT = re.compile(r"step-(\d{8,18})|\.step-(\d{8,18})\.old-[0-9a-f]{8}")
_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|del)-[0-9a-f]{8}|\.write-test-[0-9a-f]{32}")


@dataclass(frozen=True)
class Candidate:
    """A folder named like a checkpoint, valid or not."""

    step: int
    path: Path


def step_folder(root: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is published."""
    return root / f"step-{step:08d}"


def temporary_folder(root: Path, step: int, save_id: str) -> Path:
    return root / f".step-{step:08d}.tmp-{save_id[:8]}"


def candidates(root: Path) -> list[Candidate]:
    """Everything in `root` named like a checkpoint, newest step first; a folder moved aside comes after its replacement."""
    if not root.is_dir():
        return []
    checkpoints = []
    for name in os.listdir(root):
        match = _CHECKPOINT.fullmatch(name)
        if match:
            checkpoints.append(Candidate(int(match[1] or match[2]), root / name))
    return sorted(checkpoints, key=lambda candidate: (-candidate.step, candidate.path.name.startswith(".")))


def publish(temporary: Path, final: Path) -> None:
    """Rename the finished folder `temporary` to `final`, replacing an existing one. Raises OSError."""
    make_durable(temporary)
    failpoint("publish.before")
    if os.path.lexists(final):
        rename(final, final.parent / f".{final.name}.old-{uuid.uuid4().hex[:8]}")
        failpoint("publish.aside")
    rename(temporary, final)
    failpoint("publish.renamed")
    make_durable(final.parent)
    failpoint("publish.synced")
    for aside in candidates(final.parent):
        if aside.path.name.startswith(f".{final.name}.old-"):
            discard(aside.path)


def discard(folder: Path) -> None:
    """Remove a checkpoint: it is renamed first, so that a partial one is never found. A folder not of this format stays,
    because another release or program may need it."""
    if not is_understood(folder):
        return
    step_name = folder.name.lstrip(".").split(".")[0]
    doomed = folder.parent / f".{step_name}.del-{uuid.uuid4().hex[:8]}"
    failpoint("discard.before")
    rename(folder, doomed)
    failpoint("discard.renamed")
    _remove(doomed)
    failpoint("discard.removed")


def sweep(root: Path) -> list[str]:
    """Remove leftovers of killed saves and deletions in `root`. Returns the removed names.

    Only for the one job that saves into `root`, at its start: another job's save in progress looks the same.
    """
    leftovers = [name for name in os.listdir(root) if _LEFTOVER.fullmatch(name)] if root.is_dir() else []
    leftovers = [name for name in leftovers if not _is_of_another_release(root / name)]
    for name in leftovers:
        _remove(root / name)
    return sorted(leftovers)


def _is_of_another_release(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError as error:
        return isinstance(error, UnknownVersionError)
    return False


def make_folder(folder: Path) -> None:
    """Create `folder` and its missing parents durably, so that a power cut cannot lose their names. Raises OSError."""
    missing = [folder, *folder.parents]
    missing = missing[: next((depth for depth, path in enumerate(missing) if path.is_dir()), 0)]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        make_durable(path.parent)


def check_writable(root: Path) -> None:
    """Create `root` and test that a checkpoint could be published there: write, fsync, rename, remove.

    Raises CheckpointError, so that a run fails at its start and not at its first save.
    """
    probe = root / f".write-test-{uuid.uuid4().hex}"
    try:
        make_folder(root)
        probe.mkdir()
        write_file(probe / "before", b"ultrascale" * 400)
        os.rename(probe / "before", probe / "after")
        make_durable(probe)
        _remove(probe)
        make_durable(root)
    except OSError as error:
        shutil.rmtree(probe, ignore_errors=True)
        reason = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"  # a full disk has no name
        problem = f"checkpoints cannot be written here ({reason})"
        raise CheckpointError(f"{root}: {problem}. Choose a writable folder with free space.") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
