"""Damage that can be detected without reading tensors: in a manifest, file names, and the bytes of shards. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ultrascale.checkpoint.disk.files import read_manifest, verify_shard
from ultrascale.checkpoint.disk.folders import candidates, step_folder
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.manifest import Manifest, Shard

VERIFY_THREADS = 4
"""Reading and CRC-32 run outside the interpreter's lock."""


def expected_manifest(folder: Path) -> Manifest:
    """The manifest, if it matches the folder's step and lists every shard that is there. Raises CheckpointError."""
    manifest = read_manifest(folder)
    named = [c for c in candidates(folder.parent) if c.path.name == folder.name and c.step != manifest.step]
    if named:
        problem = f"holds step {manifest.step}, expected step {named[0].step}"
        raise CheckpointError(
            f"{folder}: {problem}: it was renamed or copied. Use {step_folder(folder.parent, manifest.step).name}."
        )
    unknown = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name not in manifest.shards)
    if unknown:
        raise CheckpointError(
            f"{folder}: {unknown} are not in its manifest: two checkpoints are mixed. Use another checkpoint."
        )
    return manifest


def verify_shards(folder: Path, shards: Iterable[tuple[str, Shard]], save_id: str) -> None:
    """Read every byte of these shards. Raises one CheckpointError for all damage, a line for each file."""

    def damage(item: tuple[str, Shard]) -> str | None:
        try:
            verify_shard(folder, *item, save_id)
        except CheckpointError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(VERIFY_THREADS) as pool:
        problems = [text for text in pool.map(damage, shards) if text is not None]
    if problems:
        raise CheckpointError("\n".join(problems))
