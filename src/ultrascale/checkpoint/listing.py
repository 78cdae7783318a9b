"""List of a folder's checkpoints, and which are complete; for display, in one process."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ultrascale.checkpoint.disk.damage import expected_manifest, verify_shards
from ultrascale.checkpoint.disk.files import read_manifest, verify_size
from ultrascale.checkpoint.disk.folders import Candidate, candidates
from ultrascale.checkpoint.errors import CheckpointError, UnknownVersionError
from ultrascale.checkpoint.manifest import MANIFEST_NAME, Manifest
from ultrascale.description.problems import SpecError, mistake

LATEST = 2.0**35
"""Largest time in seconds since 1970 that every system's calendar can represent; a larger one is damage."""


@dataclass(frozen=True)
class CheckpointSummary:
    """Facts about one checkpoint."""

    folder: Path
    step: int
    bytes: int | None
    """Bytes of all shards, from the manifest. This field and the next three are None if the manifest cannot be read."""
    shards: int | None
    tensors: int | None
    saved_at: float | None
    """Seconds since 1970, as stored in the checkpoint; for an older release, the modification time of its manifest."""
    problem: str | None
    """Why it must not be loaded; None if the checks that were made found nothing."""


def find_checkpoints(folder: Path) -> list[Candidate]:
    """The checkpoints in `folder`, newest first: the folder itself, checkpoints in it, or those in a run's `checkpoints`.

    Raises CheckpointError if there are none.
    """
    itself = [candidate for candidate in candidates(folder.absolute().parent) if candidate.path.name == folder.absolute().name]
    if itself or (folder / MANIFEST_NAME).exists():
        return itself or [Candidate(-1, folder)]
    checkpoints = candidates(folder) or candidates(folder / "checkpoints")
    if not checkpoints:
        raise CheckpointError(
            f"{folder}: no checkpoints here. Give a run's folder, its `checkpoints`, or one `step-...` in it."
        )
    return checkpoints


def summarize(folder: Path, *, read_all: bool) -> Iterator[CheckpointSummary]:
    """Yields a summary of each checkpoint. `read_all` reads and verifies every byte; otherwise the manifest and the shards'
    sizes."""
    for candidate in find_checkpoints(folder):
        yield _summary(candidate, read_all)


def newest_listed(root: Path, *, without: Collection[str] = ()) -> Path | None:
    """The newest checkpoint in `root`, not named in `without`, whose manifest and sizes are right. Reads no shard."""
    listed = (candidate for candidate in candidates(root) if candidate.path.name not in without)
    return next((candidate.path for candidate in listed if _summary(candidate, read_all=False).problem is None), None)


def expect_readable(folder: Path) -> None:
    """Raise an error if manifests and sizes alone show that nothing in `folder` can be loaded, before torch is imported.

    CheckpointError for the one checkpoint that `folder` names, or for an unknown format; SpecError for a run that has only
    damaged checkpoints.
    """
    checkpoints, damage = find_checkpoints(folder), []
    for candidate in checkpoints:
        try:
            _expect_sizes(candidate.path, read_manifest(candidate.path))
        except CheckpointError as error:
            if candidate.path.name == folder.absolute().name or isinstance(error, UnknownVersionError):
                raise
            damage.append(f"{candidate.path.name}: {error}")
        else:
            return
    raise only_damaged(checkpoints[0].path.parent, damage)


def only_damaged(root: Path | str, damage: list[str]) -> SpecError:
    """The error for a run whose checkpoints are all damaged; `damage` gives each reason."""
    return mistake(str(root), "\n  ".join(["holds only damaged checkpoints:", *damage]), "Give another folder.")


def _expect_sizes(folder: Path, manifest: Manifest) -> None:
    for file, shard in manifest.shards.items():
        verify_size(folder, file, shard)


def _summary(candidate: Candidate, read_all: bool) -> CheckpointSummary:
    manifest, problem = None, None
    try:
        manifest = read_manifest(candidate.path)
        if read_all:
            expected_manifest(candidate.path)
            verify_shards(candidate.path, manifest.shards.items(), manifest.save_id)
        _expect_sizes(candidate.path, manifest)
    except CheckpointError as error:
        problem = str(error)
    if manifest is None:
        return CheckpointSummary(candidate.path, candidate.step, None, None, None, None, problem)
    size = sum(shard.bytes for shard in manifest.shards.values())
    counts = len(manifest.shards), len(manifest.tensors)
    return CheckpointSummary(candidate.path, manifest.step, size, *counts, _saved_at(candidate.path, manifest), problem)


def _saved_at(folder: Path, manifest: Manifest) -> float:
    saved_at = manifest.metadata.get("saved_at")
    if isinstance(saved_at, int | float) and not isinstance(saved_at, bool) and 0 < saved_at < LATEST:
        return saved_at
    return (folder / MANIFEST_NAME).stat().st_mtime
