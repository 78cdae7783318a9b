"""Ownership of a run's store: which run it holds, and which start of that run writes to it.

A new start takes the store over, and older starts can no longer publish; this needs no clock and no liveness check. The folder
on each disk records which run of the store it belongs to, so that two runs of one name are not mixed.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from typing import Any

from ultrascale.checkpoint import CheckpointError, check_writable
from ultrascale.checkpoint.coordination import Coordinator
from ultrascale.checkpoint.disk.folders import candidates
from ultrascale.checkpoint.disk.nodes import NodeDisks, find_disks
from ultrascale.config.resolve import run_from_toml
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run
from ultrascale.storage import ConflictError, MissingError, Store, Version
from ultrascale.train.folder.resume import decisive_parts
from ultrascale.train.folder.run_folder import RunFolder

CLAIM = "run.json"
LOCAL = ".store.json"
"""File in the run's folder: the run of the store that it belongs to, and the last start whose history it holds."""
HISTORY = ("metrics.jsonl", "events.jsonl", "log.txt")


def take_over(store: Store, run: Run, folder: RunFolder, *, allow_changes: bool = False) -> str:
    """Make this start of `run` the writer of the store. Returns the name of this start in the store.

    Raises CheckpointError if the store holds another run than the folder or `run`, StorageError.
    """
    claimed, version = read_claim(store)
    if claimed is not None:
        _expect_same_id(store, folder, claimed["run_id"])
        _expect_same_run(store, run, ("batch",) if allow_changes else ("model", "batch"))
    run_id = claimed["run_id"] if claimed is not None else known_store(folder).get("run_id") or uuid.uuid4().hex
    writer = uuid.uuid4().hex
    try:
        published = store.publish(CLAIM, json.dumps({"run_id": run_id, "writer": writer}).encode(), replacing=version)
    except ConflictError as error:
        raise CheckpointError(f"{store.url}: another process is starting this run at this moment. Start it once.") from error
    store.hold(CLAIM, published)
    if claimed is not None and known_store(folder).get("writer") != claimed["writer"]:
        _bring_history(store, folder)
    folder.write_json(LOCAL, {"run_id": run_id, "writer": writer})
    return writer


def known_store(folder: RunFolder) -> dict[str, Any]:
    """Record in the folder of a run of a store and a start; empty if there is none."""
    local = folder.read_json(LOCAL)
    return local if isinstance(local, dict) else {}


def _expect_same_id(store: Store, folder: RunFolder, run_id: str) -> None:
    """Raises CheckpointError if the folder belongs to another run than the store."""
    known = known_store(folder).get("run_id")
    if known != run_id and (known is not None or candidates(folder.checkpoints)):
        problem = f"{store.url} holds another run than {folder.path}"
        raise CheckpointError(f"{problem}. Give this one a --name of its own, or another checkpoint.store.")


def _bring_history(store: Store, folder: RunFolder) -> None:
    """Copies the run's history from the store into a folder that lacks part of it, because the run continued elsewhere."""
    for name in HISTORY:
        path = folder.path / name
        with suppress(MissingError):
            stored = store.read(name)
            if not (path.exists() and path.read_bytes().startswith(stored)):
                folder.write_text(name, stored.decode())


def join_disks(store: Store, folder: RunFolder, ranks: Coordinator, writer: str) -> NodeDisks:
    """The disks that the ranks save to. Collective. Raises CheckpointError if one of several disks holds another run, or if a
    node sees another store than rank 0, such as a folder on its local disk."""
    if ranks.world == 1:
        return NodeDisks(0, (0,))
    ranks.agree("before the first save", lambda: check_writable(folder.checkpoints))
    disks = find_disks(folder.checkpoints, ranks)

    def join() -> None:
        claim, _ = read_claim(store)
        if claim is None or claim["writer"] != writer:
            raise CheckpointError(f"{store.url} is not what rank 0 sees there. Name a store that all nodes reach.")
        _expect_same_id(store, folder, claim["run_id"])
        folder.write_json(LOCAL, {"run_id": claim["run_id"]})

    if not disks.are_shared:
        ranks.agree("joining the run's store", lambda: join() if disks.leads else None)
    return disks


def read_claim(store: Store) -> tuple[dict[str, Any] | None, Version | None]:
    """The claim on a store (run id and writer) and the claim's version; (None, None) if there is none. Raises CheckpointError
    if the object is not a claim, StorageError."""
    try:
        data, version = store.read_version(CLAIM)
    except MissingError:
        return None, None
    try:
        claim = json.loads(data)
        if isinstance(claim["run_id"], str) and isinstance(claim["writer"], str):
            return claim, version
    except (ValueError, TypeError, KeyError):
        pass
    raise CheckpointError(f"{store.where(CLAIM)} is not of a run. Name another checkpoint.store, or remove it.")


def _expect_same_run(store: Store, run: Run, parts: tuple[str, ...]) -> None:
    """Raises CheckpointError if the store's run differs in one of `parts`; `restore` later reports each difference in full."""
    try:
        text = store.read("run.toml").decode()
        stored = decisive_parts(run_from_toml(text, where=store.where("run.toml")))
    except (MissingError, SpecError, UnicodeDecodeError):
        return  # its checkpoints say
    now = decisive_parts(run)
    differing = [key for key in parts if stored[key] != now[key]]
    if differing:
        problem = f"holds another run: its {' and '.join(differing)} {'is' if len(differing) == 1 else 'are'} not this one's"
        raise CheckpointError(f"{store.url} {problem}. Give this run a --name of its own, or another checkpoint.store.")
