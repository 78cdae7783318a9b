"""Inputs in a store: downloaded to `OUTPUT.inputs` on this machine, file by file, and removed once the output is complete.

Below a folder, files keep their names, which decide the held-out documents: the result is that of the same folder on a disk. A
file that exists already, with the length and the tag that it has in the store, is not downloaded again, so that a killed
preparation resumes. The tag is stored as the modification time of the file: a file that changes in the store changes here, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ultrascale.data.files import PARTIAL, DataError, reading, writing
from ultrascale.data.reading.inputs import is_left_out
from ultrascale.storage import MissingError, StorageError, Store, Stored, open_store, url_of
from ultrascale.storage.location import url_problem

STREAMS = 8
MARK = ".brought"
"""Marker file in a folder of downloaded inputs, which may be removed; locked by the process that uses it."""


@dataclass(frozen=True)
class _FetchTask:
    """Objects to download from one URL, and their target folder."""

    url: str
    store: Store
    objects: list[Stored]
    is_file: bool
    folder: Path


@contextmanager
def fetched_inputs(
    inputs: Iterable[str | Path],
    output: Path,
    *,
    glob: str,
    exclude: tuple[str, ...],
    report: Callable[[int, int], None],
) -> Iterator[tuple[list[Path], dict[Path, str]]]:
    """The inputs as local paths, and the URLs of those from a store. `report`: called with downloaded and total bytes.

    Raises DataError if an input does not exist, the store does not respond, or `OUTPUT.inputs` belongs to something else or is
    in use.
    """
    inputs = list(inputs)
    urls = {item: url for item in inputs if (url := url_of(item)) is not None}
    if not urls:
        yield [Path(item) for item in inputs], {}
        return
    folder = output.absolute().with_name(f"{output.absolute().name}.inputs")
    tasks = {url: _list_input(url, folder, glob, exclude) for url in dict.fromkeys(urls.values())}
    mark = folder / MARK
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            rule = "is there already, and inputs from the store would go there"
            raise DataError(str(folder), rule, "Move it, or choose another --output.")
    with locked(mark, output):
        _fetch_all(list(tasks.values()), report)
        origins = {task.folder / task.objects[0].key if task.is_file else task.folder: url for url, task in tasks.items()}
        paths = {url: path for path, url in origins.items()}
        yield [paths[urls[item]] if item in urls else Path(item) for item in inputs], origins
        with suppress(OSError):
            for path in folder.iterdir():
                if path != mark:
                    shutil.rmtree(path)
            mark.unlink()
            folder.rmdir()


@contextmanager
def locked(lock: Path, output: Path) -> Iterator[None]:
    """One preparation of `output` at a time, by a lock on the file `lock`; the system releases it when a process dies."""
    with writing(lock):
        file = open(lock, "w")  # noqa: SIM115 (closed below, in another `with`)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = os.fstat(file.fileno()).st_nlink == 0  # removed by who had it a moment ago
        except BlockingIOError:
            is_taken = True
        if is_taken:
            raise DataError(str(output), "is being prepared by another process", "Wait for it, or end it.")
        yield


def _list_input(url: str, folder: Path, glob: str, exclude: tuple[str, ...]) -> _FetchTask:
    if problem := url_problem(url):
        raise DataError(url, problem, "Give another place.")
    folder /= hashlib.sha256(url.encode()).hexdigest()[:16]
    wanted = []
    with reading(url):
        store = open_store(url)
        for stored in store.files():
            *folders, name = stored.key.split("/")
            if ".." in (*folders, name) or stored.key.startswith("/"):
                raise StorageError(f"its listing has {stored.key!r}, which leads out of it")
            if fnmatch(name, glob) and not any(is_left_out(part, glob, exclude) for part in (*folders, name)):
                wanted.append(stored)
        above, _, name = url.rpartition("/")
        if wanted:
            return _FetchTask(url, store, wanted, False, folder)
        with suppress(MissingError):
            if url_problem(above) is None:
                store = open_store(above)
                return _FetchTask(url, store, [store.look_up(name)], True, folder)
    raise DataError(url, f"holds no file that is asked for (--glob {glob!r})", "Give another place, or --glob.")


def _fetch_all(inputs: list[_FetchTask], report: Callable[[int, int], None]) -> None:
    """Make the folders hold the requested files, and no others."""
    total, done, lock = sum(item.bytes for task in inputs for item in task.objects), 0, threading.Lock()

    def after(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            report(done, total)

    for task in inputs:
        _clear(task.folder, {task.folder / item.key for item in task.objects})
        with reading(task.url), ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda item, task=task: _fetch_file(task.store, item, task.folder / item.key, after), task.objects))


def _clear(folder: Path, wanted: set[Path]) -> None:
    with writing(folder):
        for parent, folders, names in os.walk(folder, topdown=False):
            for name in names:
                if Path(parent, name) not in wanted:
                    Path(parent, name).unlink()
            for name in folders:
                with suppress(OSError):  # what is asked for is in it
                    Path(parent, name).rmdir()


def _fetch_file(store: Store, stored: Stored, path: Path, after: Callable[[int], None]) -> None:
    seconds = int.from_bytes(hashlib.sha256(stored.tag.encode()).digest()[:4], "big") >> 1  # fits every disk's times
    if path.exists() and (path.stat().st_size, int(path.stat().st_mtime)) == (stored.bytes, seconds):
        after(stored.bytes)
        return
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        store.fetch(stored, partial, after)
        os.utime(partial, (seconds, seconds))
        os.replace(partial, path)
