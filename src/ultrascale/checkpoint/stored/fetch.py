"""Reading from a store: which checkpoints exist, whether every byte is as it was saved, and the download of one to a disk.

Checkpoints are read by name. A listing only gives candidates, together with the note of the last published steps, so that a
listing that lags behind neither hides a checkpoint nor shows a removed one.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ultrascale.checkpoint.disk.checksum import checksum_text
from ultrascale.checkpoint.disk.damage import expected_manifest, verify_shards
from ultrascale.checkpoint.disk.files import read_manifest, verify_size
from ultrascale.checkpoint.disk.folders import make_folder, publish, step_folder, temporary_folder
from ultrascale.checkpoint.errors import CheckpointError, UnknownVersionError
from ultrascale.checkpoint.listing import CheckpointSummary
from ultrascale.checkpoint.manifest import MANIFEST_NAME, Manifest
from ultrascale.checkpoint.manifest import decode as decode_manifest
from ultrascale.checkpoint.stored.index import FOLDER, NEWEST, Index, decode, key_of, name_of, step_of
from ultrascale.failpoints import failpoint
from ultrascale.storage import MissingError, StorageError, Store, crc_of, download_files, read_parts, verify_parts

READERS = 8


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that is published in a store."""

    step: int
    where: str
    index: Index | None
    """Index of the stored checkpoint; None if it cannot be read."""
    problem: str = ""
    is_of_another_release: bool = False


def steps_listed(store: Store) -> set[int]:
    """Steps in a listing or in the note of the newest; some may have been removed."""
    steps = {step_of(entry.key) for entry in store.names(FOLDER)[0] if entry.key.endswith(".json")}
    with suppress(MissingError, ValueError, TypeError, KeyError):
        noted = json.loads(store.read(NEWEST))
        steps |= {step for step in noted["steps"] if type(step) is int and 0 <= step < 10**18}
    return {step for step in steps if step is not None}


def stored_checkpoints(store: Store) -> list[StoredCheckpoint]:
    """Every checkpoint of a run in the store, newest first. Raises StorageError."""
    with ThreadPoolExecutor(READERS) as pool:
        checkpoints = list(pool.map(lambda step: stored_checkpoint(store, step), sorted(steps_listed(store), reverse=True)))
    return [stored for stored in checkpoints if stored is not None]


def stored_checkpoint(store: Store, step: int) -> StoredCheckpoint | None:
    """The checkpoint of `step` in the store; None if there is none. Raises StorageError."""
    key = key_of(step)
    where = store.where(key)
    try:
        index = decode(store.read(key), where)
    except MissingError:
        return None
    except UnknownVersionError as error:
        return StoredCheckpoint(step, where, None, str(error), is_of_another_release=True)
    except CheckpointError as error:
        return StoredCheckpoint(step, where, None, str(error))
    if index.step != step:
        return StoredCheckpoint(
            step, where, None, f"{where}: holds step {index.step}: it was renamed or copied. Use another checkpoint."
        )
    return StoredCheckpoint(step, where, index)


def fetch(store: Store, index: Index, root: Path, *, only: Collection[str] | None = None) -> Path:
    """Download a checkpoint into the folder `root`, where it appears atomically. Returns its folder. Shards of the same save
    that are there and verify are not downloaded again. With `only`: these shards and the manifest, as on one node's local disk;
    the folder then lacks the others.

    Raises StorageError, OSError, and CheckpointError if its manifest is not the one that was uploaded with it.
    """
    make_folder(root)
    final = step_folder(root, index.step)
    at_hand = _intact_files(final, index)
    wanted = index.files.keys() if only is None else {MANIFEST_NAME, *only}
    if wanted <= at_hand:
        return final
    temporary = temporary_folder(root, index.step, uuid.uuid4().hex)
    temporary.mkdir()
    try:
        for file in at_hand:
            with suppress(OSError):  # some file systems have no links
                os.link(final / file, temporary / file)
        brought = (wanted & index.files.keys()) - set(os.listdir(temporary))
        download_files(store, {temporary / file: (index.prefix(file), index.files[file]) for file in sorted(brought)})
        failpoint("fetch.files")
        manifest = read_manifest(temporary)
        _expect_same(index, manifest.step, manifest.save_id, store)
        for file in manifest.shards if only is None else only:
            verify_size(temporary, file, manifest.shards[file])
        publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    failpoint("fetch.done")
    return final


def _intact_files(folder: Path, index: Index) -> set[str]:
    """Files of a stored checkpoint that `folder` has intact."""
    intact: set[str] = set()
    with suppress(CheckpointError):
        manifest = expected_manifest(folder)
        if (manifest.step, manifest.save_id) == (index.step, index.save_id):
            intact.add(MANIFEST_NAME)
            for file in sorted(manifest.shards.keys() & set(os.listdir(folder))):
                with suppress(CheckpointError):
                    verify_shards(folder, [(file, manifest.shards[file])], manifest.save_id)
                    intact.add(file)
    return intact & index.files.keys()


def stored_manifest(store: Store, index: Index) -> Manifest:
    """The manifest of a stored checkpoint. Raises CheckpointError if it belongs to another one, StorageError."""
    data = read_parts(store, index.files[MANIFEST_NAME], index.prefix(MANIFEST_NAME))
    manifest = decode_manifest(data, store.where(index.prefix(MANIFEST_NAME)))
    _expect_same(index, manifest.step, manifest.save_id, store)
    return manifest


def verify_stored(store: Store, index: Index) -> None:
    """Read every byte of a stored checkpoint, and compare with the checksums of its parts and of its manifest.

    Raises CheckpointError naming what is damaged, StorageError if the store does not respond.
    """
    where, manifest = store.where(index.prefix(MANIFEST_NAME)), stored_manifest(store, index)
    for file, shard in manifest.shards.items():
        if file not in index.files:
            raise CheckpointError(f"{where}: names {file}, which is not among the files put there. Use another checkpoint.")
        parts = index.files[file]
        size, checksum = sum(part.bytes for part in parts), checksum_text(crc_of(parts))
        if (size, checksum) != (shard.bytes, shard.checksum):
            problem = f"{size} bytes of checksum {checksum}, expected {shard.bytes} of {shard.checksum}"
            raise CheckpointError(f"{store.where(index.prefix(file))}: {problem}. Use another checkpoint.")
    verify_parts(store, {index.prefix(file): index.files[file] for file in manifest.shards})


def summarize_stored(store: Store, *, read_all: bool) -> Iterator[CheckpointSummary]:
    """A summary of each stored checkpoint, newest first. `read_all` reads and verifies every byte; otherwise the index, and
    whether every part exists with its full length. Raises CheckpointError if there are none, StorageError."""
    checkpoints = stored_checkpoints(store)
    if not checkpoints:
        raise CheckpointError(f"{store.url}: no checkpoints here. Give the place of a run's folder.")
    for stored in checkpoints:
        index, problem = stored.index, stored.problem or None
        if index is None:
            yield CheckpointSummary(Path(name_of(stored.step)), stored.step, None, None, None, None, problem)
            continue
        try:
            if read_all:
                verify_stored(store, index)
            else:
                _expect_parts(store, index)
        except (CheckpointError, StorageError) as error:
            problem = str(error)
        shards = len(index.files) - 1
        yield CheckpointSummary(
            Path(name_of(stored.step)), stored.step, index.bytes, shards, index.tensors, index.saved_at or 0.0, problem
        )


def _expect_parts(store: Store, index: Index) -> None:
    sizes = list(zip(index.part_keys(), (part.bytes for parts in index.files.values() for part in parts), strict=True))
    with ThreadPoolExecutor(READERS) as pool:
        for (key, size), actual in zip(sizes, pool.map(lambda entry: _size(store, entry[0]), sizes), strict=True):
            if actual != size:
                problem = "missing" if actual is None else f"{actual} bytes long"
                raise CheckpointError(f"{store.where(key)}: {problem}, expected {size} bytes. Use another checkpoint.")


def _size(store: Store, key: str) -> int | None:
    try:
        return store.size(key)
    except MissingError:
        return None


def _expect_same(index: Index, step: int, save_id: str, store: Store) -> None:
    if (step, save_id) != (index.step, index.save_id):
        problem = f"its manifest is of step {step} save {save_id}, expected step {index.step} save {index.save_id}"
        raise CheckpointError(f"{store.where(key_of(index.step))}: {problem}. Use another checkpoint.")
