"""Saves on nodes with disks of their own, of a run that is kept in a store: which of them can still be uploaded, and by whom.

A save whose shards are all on some node's disk is not lost, even if the job ended before it was in the store: the next start
uploads it, whatever numbers its ranks have by then. With a node that is gone its shards are gone: the newest is then the one
that the store has.
"""

from __future__ import annotations

from pathlib import Path

from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.disk.files import read_manifest, verify_size
from ultrascale.checkpoint.disk.folders import candidates, step_folder
from ultrascale.checkpoint.disk.nodes import NodeDisks
from ultrascale.checkpoint.manifest import MANIFEST_NAME, Manifest

Save = tuple[int, str, list[str]]
"""Step, save, and the shards of it on a disk."""


def saves_on(root: Path) -> list[Save]:
    """The saves in `root` whose manifest can be read, with the shards that are as long as it says; newest first."""
    return [(step, one.save_id, [file for file in one.shards if _is_there(root, one, file)]) for step, one in _manifests(root)]


def uploads(root: Path, gathered: list[list[Save]], disks: NodeDisks, *, after: int) -> list[tuple[str, list[list[str]]]]:
    """Saves after step `after` that are whole on the disks of all nodes together, newest first: the folder's name, and by rank
    the files that it uploads. On rank 0, whose disk must have the manifest; `gathered`: by rank, `saves_on` of leaders."""
    found: list[tuple[str, list[list[str]]]] = []
    for step, manifest in _manifests(root):
        holders: dict[str, set[int]] = {file: set() for file in manifest.shards}
        for leader, saves in enumerate(gathered):
            for file in [file for one in saves if (one[0], one[1]) == (step, manifest.save_id) for file in one[2]]:
                holders[file].add(leader)
        if step > after and all(holders.values()):
            shares: list[list[str]] = [[] for _ in disks.leaders]
            for file, leaders in holders.items():
                able = [share for share, leader in zip(shares, disks.leaders, strict=True) if leader in leaders]
                min(able, key=len).append(file)
            shares[0].append(MANIFEST_NAME)
            found.append((step_folder(root, step).name, shares))
    return found


def _manifests(root: Path) -> list[tuple[int, Manifest]]:
    found: list[tuple[int, Manifest]] = []
    for one in candidates(root):
        try:
            manifest = read_manifest(one.path)
        except CheckpointError:
            continue
        if one.path == step_folder(root, manifest.step):
            found.append((one.step, manifest))
    return found


def _is_there(root: Path, manifest: Manifest, file: str) -> bool:
    try:
        verify_size(step_folder(root, manifest.step), file, manifest.shards[file])
    except CheckpointError:
        return False
    return True
