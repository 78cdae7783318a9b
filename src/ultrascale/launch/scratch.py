"""Temporary folders on a disk with free space, which are removed with the processes that use them.

$TMPDIR may be full while the run's own disk is healthy; that must neither end a run nor prevent a restart.

The creator of a folder holds a lock in it while it lives. When a folder is created, leftovers of killed processes are removed:
this user's folders whose lock is free, and in which no other lock is held, such as that of ranks that are still exiting; and
the semaphores named after them. Signs of life of ranks that torchrun started have no such lock, because the next attempt reads
them: they are removed once they are an hour old and none of their ranks lives.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from ultrascale import console
from ultrascale.heartbeat import FILE_BYTES, SUFFIX, read

PREFIX, OWNER = "ultrascale-", "owner.lock"
SIGNS_PREFIX = f"{PREFIX}signs-"
SIGNS_KEPT_SECONDS = 3600.0
MEMORY = Path("/dev/shm")
SEMAPHORES = MEMORY
MOST_SOCKET_PATH = 100
"""Characters, of the 108 and 104 that Linux and macOS allow."""
SPARE_BYTES = 1 << 16
"""Spare bytes for the run's description, stores and error reports of ranks; stacks of a hang may need more."""


def scratch_places(*others: Path | None) -> Iterator[Path]:
    """Folders in which a temporary one may be created: the default first, then memory and `others`."""
    with suppress(FileNotFoundError):  # if none of Python's candidates is writable
        yield Path(tempfile.gettempdir())
    yield from (place for place in (MEMORY, *others) if place is not None and place.is_dir())


def folder_with_space(prefix: str, ranks: int, *others: Path | None, first: Path | None = None) -> Path:
    """A new temporary folder with space for the signs of life of `ranks` ranks: in `first`, if given, else in one of
    `scratch_places`. Prints the place, if it is not the default.

    Raises OSError if no place has space.
    """
    failure = OSError(errno.ENOENT, "no temporary folder can be made", "TMPDIR")
    places = [*([] if first is None else [first]), *scratch_places(*others)]
    for number, place in enumerate(places):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            _expect_space(folder / "room", 2 * ranks * FILE_BYTES + SPARE_BYTES)
        except OSError as error:
            failure = error if number == 0 else failure
            if folder is not None:
                folder.rmdir()
            continue
        if number > 0:
            usual = places[0] if first is None else first.parent
            console.print_line(f"note: {usual} cannot be written ({failure.strerror}): the ranks meet in {place}", "stderr")
        return folder
    raise failure


def _expect_space(file: Path, size: int) -> None:
    try:
        with open(file, "wb") as probe:
            probe.write(bytes(size))
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A new temporary folder until the end of the block. Raises OSError if none can be created."""
    sweep()
    with ExitStack() as leaving:
        yield _locked(f"{PREFIX}{purpose}-", leaving)


def _locked(prefix: str, leaving: ExitStack, places: Iterable[Path] | None = None) -> Path:
    failure = OSError(errno.ENOENT, "no temporary folder can be made", "TMPDIR")
    for place in scratch_places() if places is None else places:
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
            leaving.callback(shutil.rmtree, folder, ignore_errors=True)
            lock = folder / f"{OWNER}.new"
            owner = leaving.enter_context(lock.open("w"))
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.rename(folder / OWNER)  # once locked: a folder without a lock is never removed
            return folder
        except OSError as error:
            failure = error
    raise failure


@cache
def launcher_scratch() -> Path:
    """The launcher's temporary folder, until this process ends. Files of multiprocessing are put there and named after it."""
    leaving = ExitStack()
    atexit.register(leaving.close)
    folder = leaving.enter_context(scratch_folder("launch"))
    private = getattr(multiprocessing.current_process(), "_config", {})
    if sys.platform == "linux" and "semprefix" in private:
        private["semprefix"] = f"/{folder.name}"
    sockets = folder
    if len(os.fsencode(folder / "listener-12345678")) > MOST_SOCKET_PATH:
        sockets = _locked(f"{PREFIX}launch-", leaving, (MEMORY, Path("/tmp")))
    private.setdefault("tempdir", str(sockets))
    return folder


def sweep() -> None:
    """Remove leftovers of this user's killed processes."""
    for place in scratch_places():
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX):
                    with suppress(OSError):
                        _sweep(entry)


def _sweep(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    folder = Path(entry.path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    if not (folder / OWNER).is_file():
        if entry.name.startswith(SIGNS_PREFIX) and _is_left(folder, status.st_mtime):
            shutil.rmtree(folder)
        return
    with ExitStack() as holding:
        for path in folder.rglob("*.lock"):
            fcntl.flock(holding.enter_context(open(path)), fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
        for semaphore in SEMAPHORES.glob(f"sem.{folder.name}-*"):
            semaphore.unlink()
        shutil.rmtree(folder)


def _is_left(signs: Path, changed: float) -> bool:
    """True if the signs of life belong to ranks that are long gone, and hold nothing worth keeping, such as a stack."""
    if time.time() - changed < SIGNS_KEPT_SECONDS or any(
        path.suffix != SUFFIX and path.stat().st_size for path in signs.iterdir()
    ):
        return False
    return not any(beat.lives for beat in read(signs))
