"""Inputs that are in a store: brought to `OUTPUT.inputs` on this machine, file by file, and removed once the output is whole.

Below a folder, files keep their names, by which documents are held out: the result is that of the same folder on a disk. A file
that is there already, as long as in the store, is not brought again, so that a killed preparation goes on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from ultrascale.data.files import PARTIAL, DataError, writing
from ultrascale.data.reading.inputs import matches
from ultrascale.storage import MissingError, StorageError, Store, Stored, open_store, url_of

STREAMS = 8


@contextmanager
def brought(inputs: Iterable[str | Path], output: Path, *, glob: str, exclude: tuple[str, ...]) -> Iterator[list[Path]]:
    """The inputs as paths of this machine. Raises DataError if one is not there, or the store does not answer."""
    folder = output.absolute().with_name(f"{output.absolute().name}.inputs")
    found = [_brought(item, folder / str(number), glob, exclude) for number, item in enumerate(inputs)]
    yield found
    shutil.rmtree(folder, ignore_errors=True)


def _brought(item: str | Path, folder: Path, glob: str, exclude: tuple[str, ...]) -> Path:
    url = url_of(item)
    if url is None:
        return Path(item)
    try:
        store, wanted = open_store(url), []
        for one in store.walk(""):
            *folders, name = one.key.split("/")
            if ".." in (*folders, name) or one.key.startswith("/"):
                raise StorageError(f"its listing has {one.key!r}, which leads out of it")
            if fnmatch(name, glob) and not any(matches(part, exclude) for part in (*folders, name)):
                wanted.append(one)
        if not wanted:
            return _brought_file(url, folder)
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda one: _bring(store, one, folder), wanted))
        return folder
    except StorageError as error:
        raise DataError(url, f"cannot be read: {error}", "Check the name, and the credentials in the environment.") from error


def _brought_file(url: str, folder: Path) -> Path:
    above, _, name = url.rpartition("/")
    store = open_store(above)
    try:
        return _bring(store, Stored(name, store.size(name)), folder)
    except MissingError:
        raise DataError(url, "holds no file that is asked for", "Give another place, or --glob.") from None


def _bring(store: Store, one: Stored, folder: Path) -> Path:
    path = folder / one.key
    if path.exists() and path.stat().st_size == one.bytes:
        return path
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            file.writelines(store.blocks(one.key))
        os.utime(partial, (0, 0))  # brought again, it is the same file
        os.replace(partial, path)
    return path
