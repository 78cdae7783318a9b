"""A folder as a store: a shared disk under the rules of an object store."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ultrascale.output_file import make_durable
from ultrascale.storage.errors import ConflictError, MissingError, StorageError
from ultrascale.storage.store import Block, Store, Stored, Version

_PARTIAL = ".put-"
_LOCK = ".publish.lock"
_BLOCK_BYTES = 256 << 10


class FileStore(Store):
    """The folder `root`, which is created with the first object."""

    def __init__(self, root: Path):
        self.root = root.absolute()
        self.url = str(self.root)

    def read(self, key: str) -> bytes:
        with self._naming_errors(key, "read"):
            return self._path(key).read_bytes()

    def read_version(self, key: str) -> tuple[bytes, Version]:
        data = self.read(key)
        return data, Version.of(data)

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        with self._naming_errors(key, "read"), open(self._path(key), "rb") as file:
            return os.pread(file.fileno(), end - begin, begin)

    def blocks(self, key: str) -> Iterator[Block]:
        with self._naming_errors(key, "read"), open(self._path(key), "rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def look_up(self, key: str) -> Stored:
        with self._naming_errors(key, "read"):
            return _stored(self._path(key).stat(), key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        with self._naming_errors(key, "written"), self._partial(key) as partial:
            os.replace(_written(partial, data), self._path(key))

    def write_file(self, key: str, path: Path) -> None:
        with open(path, "rb") as source, self._naming_errors(key, "written"), self._partial(key) as partial:
            with open(partial, "xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            os.replace(partial, self._path(key))

    def publish(self, key: str, data: bytes, *, replacing: Version | None) -> Version:
        with self._naming_errors(key, "written"), self._partial(key) as partial, self._alone():
            _written(partial, data)
            try:
                now = self.read(key)
            except MissingError:
                now = None
            if now == data:
                return Version.of(data)
            if (None if now is None else Version.of(now)) != replacing:
                raise ConflictError(f"{self.where(key)} was written by somebody else.")
            os.replace(partial, self._path(key))
            make_durable(self._path(key).parent)
        return Version.of(data)

    def names(self, prefix: str) -> tuple[list[Stored], list[str]]:
        objects, folders = [], []
        with self._naming_errors(prefix, "listed"):
            for entry in sorted(self._entries(prefix), key=lambda entry: entry.name):
                if entry.is_dir():
                    folders.append(entry.name)
                elif not entry.name.startswith(_PARTIAL) and entry.name != _LOCK:
                    objects.append(_stored(entry.stat(), entry.name))
        return objects, folders

    def walk(self, prefix: str) -> Iterator[Stored]:
        objects, folders = self.names(prefix)
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        yield from (replace(stored, key=f"{start}{stored.key}") for stored in objects)
        for folder in folders:
            yield from self.walk(f"{start}{folder}")

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._naming_errors(key, "removed"), suppress(FileNotFoundError):
                path.unlink()
            with suppress(OSError):  # not empty: others are there
                while (path := path.parent) != self.root:
                    path.rmdir()

    def _path(self, key: str) -> Path:
        return self.root / key

    def _entries(self, prefix: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._path(prefix)) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def _partial(self, key: str) -> Iterator[Path]:
        """Temporary name, beside the object's, for an incomplete file."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        try:
            yield partial
        finally:
            with suppress(OSError):
                partial.unlink()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other process publishes here."""
        with open(self._path(_LOCK), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _naming_errors(self, key: str, done: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise MissingError(f"{self.where(key)} is not there.") from error
        except OSError as error:
            remedy = " Free space or choose another store." if error.errno in (27, 28, 122) else ""
            raise StorageError(f"{self.where(key)} cannot be {done}: {error.strerror}.{remedy}") from error


def _written(path: Path, data: bytes | memoryview) -> Path:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return path


def _stored(facts: os.stat_result, key: str) -> Stored:
    return Stored(key, facts.st_size, str(facts.st_mtime_ns))
