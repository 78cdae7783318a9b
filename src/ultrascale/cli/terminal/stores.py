"""Folders on the command line that are in a store: downloaded before reading, and uploaded once they are complete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ultrascale.description.problems import mistake
from ultrascale.storage import MissingError, Store, open_store, url_of
from ultrascale.storage.hub import HubStore
from ultrascale.storage.location import url_problem

CONFIG, TOKENIZER = "config.json", "tokenizer.json"


def store_of(place: Path, *, to_write: bool = False) -> Store | None:
    """The store that `place` names; None if it is a local folder. Raises SpecError if `place` cannot be a store."""
    url = url_of(place)
    if url is not None and (problem := url_problem(url, to_write=to_write)):
        raise mistake(url, problem, "Give another place.")
    return None if url is None else open_store(url.removesuffix("/checkpoints"))


@contextmanager
def fetched(place: Path) -> Iterator[Path]:
    """`place` itself, or a temporary folder with its content: a Hugging Face folder, or a run's newest complete checkpoint.

    Raises SpecError if the store holds neither, StorageError, CheckpointError.
    """
    store = store_of(place)
    if store is None:
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as scratch:
        local_folder = Path(scratch) / store.url.rsplit("/", 1)[-1]
        local_folder.mkdir()
        files = [stored for stored in store.names("")[0] if stored.key]  # a web console's marker of the folder has none
        if CONFIG in [stored.key for stored in files]:
            for stored in files:
                store.fetch(stored, local_folder / stored.key)
        else:
            fetch_newest_checkpoint(store, local_folder)
        yield local_folder


def fetch_newest_checkpoint(store: Store, run: Path) -> None:
    """Download the newest complete checkpoint of the run in `store`, and its tokenizer's files, to the run's folder `run`."""
    from ultrascale.checkpoint import CheckpointError
    from ultrascale.checkpoint.listing import only_damaged
    from ultrascale.checkpoint.stored.fetch import fetch, stored_checkpoints
    from ultrascale.models.files.tokenizer_files import TOKENIZER_FILES
    from ultrascale.storage import DamagedError

    damage = []
    for checkpoint in stored_checkpoints(store):
        try:
            if checkpoint.index is None:
                raise CheckpointError(checkpoint.problem)
            fetch(store, checkpoint.index, run / "checkpoints")
        except (CheckpointError, DamagedError) as error:
            damage.append(str(error))
            continue
        for name in TOKENIZER_FILES:
            with suppress(MissingError):
                (run / name).write_bytes(store.read(name))
        return
    if damage:
        raise only_damaged(store.url, damage)
    remedy = "Give the place of a run's folder, or of a Hugging Face folder."
    raise mistake(store.url, "holds no checkpoint and no config.json", remedy)


@contextmanager
def uploaded(place: Path, *, overwrite: bool) -> Iterator[Path]:
    """`place` itself, or a temporary folder whose files are uploaded afterwards, `config.json` last. For hf:// the caller
    uploads the folder, which is kept if that fails.

    Raises SpecError if something exists there already and must not be overwritten, or is not an export; StorageError.
    """
    store = store_of(place)
    if store is None:
        yield place
        return
    if isinstance(store, HubStore):
        push_folder = Path(tempfile.mkdtemp(prefix="ultrascale-"))
        yield push_folder / "export"
        shutil.rmtree(push_folder)
        return
    existing = {stored.key for stored in store.files()}
    if existing and not (overwrite and CONFIG in existing):
        rule = "holds something already" if not overwrite else "holds something that is no export"
        raise mistake(store.url, rule, "Give another place, or --overwrite for an earlier export.")
    store.expect_usable(".probe")
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as scratch:
        export_folder = Path(scratch) / "export"
        yield export_folder
        files = sorted(path for path in export_folder.rglob("*") if path.is_file())
        names = {path.relative_to(export_folder).as_posix(): path for path in files}
        store.remove([CONFIG] if CONFIG in existing else [])
        for name in sorted(names, key=lambda name: (name == CONFIG, name)):
            store.write_file(name, names[name])
        store.remove(sorted(existing - set(names) - {CONFIG}))
