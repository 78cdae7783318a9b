"""Upload to a store: parts of every file, then the index, put conditionally; and removal from it.

The caller decides which ranks write which files: each writes those it has, and one publishes once all are there.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ultrascale.checkpoint.disk.checksum import checksum_text
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.manifest import MANIFEST_NAME, Manifest
from ultrascale.checkpoint.stored.fetch import StoredCheckpoint, steps_listed, stored_checkpoints, verify_stored
from ultrascale.checkpoint.stored.index import FOLDER, NEWEST, Index, decode, encode, folder_of, key_of, name_of, step_of
from ultrascale.failpoints import failpoint
from ultrascale.storage import MissingError, PartObject, Store, Version, crc_of, upload_file

Files = dict[str, tuple[PartObject, ...]]


def files_of(manifest: Manifest) -> list[str]:
    """The files of a checkpoint's folder, the manifest last."""
    return [*manifest.shards, MANIFEST_NAME]


def upload_files(store: Store, folder: Path, files: Collection[str], *, resuming: bool = False) -> Files:
    """Upload the parts of these files of a checkpoint's folder. Returns each file's parts.

    Raises CheckpointError if a shard on disk does not match its manifest: then nothing of it is ever published. Raises
    StorageError, OSError.
    """
    manifest = read_manifest(folder)
    uploaded: Files = {}
    failpoint("upload.start")
    for file in files:
        prefix = f"{folder_of(manifest.step, manifest.save_id)}/{file}"
        parts = upload_file(store, folder / file, prefix, resuming=resuming)
        shard = manifest.shards.get(file)
        if shard is not None and (sum(part.bytes for part in parts), checksum_text(crc_of(parts))) != (
            shard.bytes,
            shard.checksum,
        ):
            raise CheckpointError(
                f"{folder / file}: its bytes have changed since it was saved; it is not put into {store.url}."
            )
        uploaded[file] = parts
        failpoint("upload.file")
    return uploaded


def publish_stored(store: Store, manifest: Manifest, files: Files, *, before: Version | None) -> Index:
    """Publish in the store the checkpoint of `manifest`, whose parts are all uploaded; `before` is the version of that step
    last seen there. Raises ConflictError if the version has changed, CheckpointError, StorageError."""
    lacking = sorted(set(files_of(manifest)) - set(files))
    if lacking:
        problem = f"{name_of(manifest.step)}: {lacking[:20]} were not uploaded, so that it is not published in {store.url}."
        raise CheckpointError(problem)
    saved = manifest.metadata.get("saved_at")
    saved_at = float(saved) if isinstance(saved, int | float) else None
    index = Index(manifest.step, manifest.save_id, saved_at, len(manifest.tensors), files)
    key = key_of(index.step)
    data = encode(index)
    decode(data, store.where(key))  # Never publish an index that a later load would refuse.
    failpoint("store.before")
    store.publish(key, data, replacing=before)
    failpoint("store.published")
    if store.listings_lag:
        write_newest(store, index.step)
    failpoint("store.newest")
    return index


def published_version(store: Store, step: int) -> tuple[Version | None, str | None]:
    """Version and save id of the published step; the save id is None also if it cannot be read."""
    key = key_of(step)
    try:
        data, version = store.read_version(key)
    except MissingError:
        return None, None
    try:
        return version, decode(data, store.where(key)).save_id
    except CheckpointError:
        return version, None


def write_newest(store: Store, step: int) -> None:
    """Write the note of existing steps, for readers whose listing lags behind."""
    steps = sorted({*steps_listed(store), step}, reverse=True)[:1000]
    store.write(NEWEST, json.dumps({"steps": steps, "last": step}).encode())


def prune_stored(store: Store, step: int, *, keep: int, keep_every_steps: int | None, verified: set[str]) -> list[str]:
    """Remove checkpoints older than the `keep` newest up to `step` (0: none), as on disk. Returns the removed names.

    Nothing is removed before the newest was read back in full, once; `verified` remembers its save id. Later steps stay. Raises
    CheckpointError if it does not verify, StorageError.
    """
    checkpoints = [stored for stored in stored_checkpoints(store) if stored.step <= step] if keep else []
    doomed: list[StoredCheckpoint] = []
    num_kept = 0
    for stored in checkpoints:
        if num_kept < keep:
            num_kept += stored.index is not None
        elif not (keep_every_steps and stored.step % keep_every_steps == 0):
            doomed.append(stored)
    if not doomed:
        return []
    newest = checkpoints[0]
    if newest.index is None:
        raise CheckpointError(f"{newest.where}: {newest.problem}")
    if newest.index.save_id not in verified:
        verify_stored(store, newest.index)
        verified.add(newest.index.save_id)
    for stored in doomed:
        if stored.index is None and stored.is_of_another_release:
            continue
        failpoint("store.prune")
        store.remove([key_of(stored.step)])  # The index goes first, so that a partial checkpoint is never found.
        failpoint("store.unnamed")
        _remove_under(store, f"{FOLDER}/{name_of(stored.step)}")
    return [name_of(stored.step) for stored in doomed]


def collect_leftovers(store: Store, *, busy: Collection[str]) -> int:
    """Remove parts of saves that were never published, or were replaced. Returns the number of objects. `busy`: saves to keep.

    Only for the one job that owns the run, after it has published: another job's upload in progress looks the same.
    """
    removed = 0
    for name in store.names(FOLDER)[1]:
        step = step_of(name)
        if step is None:
            continue
        saves = store.names(f"{FOLDER}/{name}")[1]
        stale = [save for save in saves if save not in busy]
        if not stale:
            continue
        version, published = published_version(store, step)
        if version is not None and published is None:
            continue  # it cannot be read, or another release wrote it: keep it
        for save in stale:
            if save != published:
                removed += _remove_under(store, f"{FOLDER}/{name}/{save}")
    return removed


def _remove_under(store: Store, folder: str) -> int:
    keys = [entry.key for entry in store.walk(folder)]
    with suppress(MissingError):
        store.remove(keys)
    return len(keys)
