"""Saves on local disks of nodes, for a run kept in a store: which of them can still be uploaded, and by which rank.

A save whose shards are all on some node's disk is not lost, even if the job ended before the upload: the next start uploads it,
whatever numbers its ranks have by then. The shards of a lost node are lost: the newest checkpoint is then the store's.
"""

from __future__ import annotations

from pathlib import Path

from ultrascale.checkpoint import CheckpointError, UnknownVersionError
from ultrascale.checkpoint.disk.files import read_manifest, verify_size
from ultrascale.checkpoint.disk.folders import candidates, step_folder
from ultrascale.checkpoint.disk.nodes import NodeDisks
from ultrascale.checkpoint.manifest import MANIFEST_NAME, Manifest

Save = tuple[int, str, list[str], list[str]]
"""Step, save id, its shards, and those of them on a disk."""


def saves_on(root: Path) -> list[Save]:
    """The saves in `root` whose manifest can be read, with the shards of the expected length; newest first.

    Raises UnknownVersionError if another release wrote a newer one than these.
    """
    return [
        (step, manifest.save_id, list(manifest.shards), [file for file in manifest.shards if _is_there(root, manifest, file)])
        for step, manifest in _manifests(root)
    ]


def whole_saves(gathered: list[list[Save]], disks: NodeDisks) -> list[tuple[int, str, list[list[str]]]]:
    """Saves that are complete on the disks of all nodes together, newest first: step, save id, and by rank the files to upload.
    `gathered`: `saves_on` of each leader, by rank. No single disk needs all of them: a replaced disk is empty, even rank 0's.
    """
    holders: dict[tuple[int, str], dict[str, set[int]]] = {}
    for leader, saves in enumerate(gathered):
        for step, save_id, shards, present in saves:
            known = holders.setdefault((step, save_id), {file: set() for file in (*shards, MANIFEST_NAME)})
            for file in (*present, MANIFEST_NAME):
                known[file].add(leader)
    complete: list[tuple[int, str, list[list[str]]]] = []
    for (step, save_id), files in sorted(holders.items(), key=lambda entry: -entry[0][0]):
        if all(files.values()):
            shares: list[list[str]] = [[] for _ in disks.leaders]
            for file, leaders in files.items():
                able = [share for share, leader in zip(shares, disks.leaders, strict=True) if leader in leaders]
                min(able, key=len).append(file)
            complete.append((step, save_id, shares))
    return complete


def _manifests(root: Path) -> list[tuple[int, Manifest]]:
    manifests: list[tuple[int, Manifest]] = []
    for candidate in candidates(root):
        try:
            manifest = read_manifest(candidate.path)
        except CheckpointError as error:
            if isinstance(error, UnknownVersionError) and not manifests:
                raise
            continue
        if candidate.path == step_folder(root, manifest.step):
            manifests.append((candidate.step, manifest))
    return manifests


def _is_there(root: Path, manifest: Manifest, file: str) -> bool:
    try:
        verify_size(step_folder(root, manifest.step), file, manifest.shards[file])
    except CheckpointError:
        return False
    return True
