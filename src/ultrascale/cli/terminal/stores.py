"""Folders of the command line that are in a store: brought here to be read, and sent there once they are whole."""

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
    """The store that `place` names; None if it is a folder of this machine. Raises SpecError if it can be none."""
    url = url_of(place)
    if url is not None and (problem := url_problem(url, to_write=to_write)):
        raise mistake(url, problem, "Give another place.")
    return None if url is None else open_store(url.removesuffix("/checkpoints"))


@contextmanager
def brought(place: Path) -> Iterator[Path]:
    """`place`, or while inside a folder with what it holds: a Hugging Face folder, or a run's newest whole checkpoint.

    Raises SpecError if the store holds neither, StorageError, CheckpointError."""
    store = store_of(place)
    if store is None:
        yield place
        return
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as scratch:
        here = Path(scratch) / store.url.rsplit("/", 1)[-1]
        here.mkdir()
        files = [one for one in store.names("")[0] if one.key]  # a console's marker of the folder has none
        if CONFIG in [one.key for one in files]:
            for one in files:
                store.fetch(one, here / one.key)
        else:
            bring_newest(store, here)
        yield here


def bring_newest(store: Store, run: Path) -> None:
    """Bring the newest whole checkpoint of the run in `store` into the run's folder `run`, and its tokenizer."""
    from ultrascale.checkpoint import CheckpointError
    from ultrascale.checkpoint.listing import only_damaged
    from ultrascale.checkpoint.stored import fetch, found_in
    from ultrascale.storage import DamagedError

    damage = []
    for one in found_in(store):
        try:
            if one.index is None:
                raise CheckpointError(one.problem)
            fetch(store, one.index, run / "checkpoints")
        except (CheckpointError, DamagedError) as error:
            damage.append(str(error))
            continue
        with suppress(MissingError):
            (run / TOKENIZER).write_bytes(store.read(TOKENIZER))
        return
    if damage:
        raise only_damaged(store.url, damage)
    remedy = "Give the place of a run's folder, or of a Hugging Face folder."
    raise mistake(store.url, "holds no checkpoint and no config.json", remedy)


@contextmanager
def sent(place: Path, *, overwrite: bool) -> Iterator[Path]:
    """`place`, or while inside a folder whose files go to the store after that, `config.json` last. For hf:// the folder is the
    caller's to push, and stays if that fails.

    Raises SpecError if something is there already and is not to be overwritten, or is no export; StorageError."""
    store = store_of(place)
    if store is None:
        yield place
        return
    if isinstance(store, HubStore):
        kept = Path(tempfile.mkdtemp(prefix="ultrascale-"))
        yield kept / "export"
        shutil.rmtree(kept)
        return
    there = {one.key for one in store.files()}
    if there and not (overwrite and CONFIG in there):
        rule = "holds something already" if not overwrite else "holds something that is no export"
        raise mistake(store.url, rule, "Give another place, or --overwrite for an earlier export.")
    store.expect_usable(".probe")
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as scratch:
        here = Path(scratch) / "export"
        yield here
        files = sorted(path for path in here.rglob("*") if path.is_file())
        names = {path.relative_to(here).as_posix(): path for path in files}
        store.remove([CONFIG] if CONFIG in there else [])
        for name in sorted(names, key=lambda name: (name == CONFIG, name)):
            store.write_file(name, names[name])
        store.remove(sorted(there - set(names) - {CONFIG}))
