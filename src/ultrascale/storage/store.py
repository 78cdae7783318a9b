"""`Store`: the one seam to where files are kept. Keys are relative and joined by `/`.

A reader sees an object whole or not at all. Nothing is ever renamed: what must appear in one piece is made of objects that
nobody looks for, and then of one that names them, which `publish` writes on a condition.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from ultrascale.storage.errors import DamagedError, MissingError, RefusedError, StorageError

Block: TypeAlias = bytes | memoryview
READS = 3
"""Attempts to read an answer that breaks off; a request that gets none is sent again beneath."""
PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Version:
    """One state of one object: the tag of its content, and where the store counts versions, the number."""

    tag: str
    number: str | None = None


@dataclass(frozen=True)
class Stored:
    """An object of a listing."""

    key: str
    bytes: int
    tag: str = ""
    """Text that differs once the content does."""


class Store(ABC):
    """A place for files. All methods may be called from any thread, and raise StorageError."""

    url: str
    """URL as a person writes it, without a trailing `/`."""
    listings_lag = True
    """False if every listing shows what was published before it."""

    def where(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{key}"

    @abstractmethod
    def read(self, key: str) -> bytes:
        """All of an object. Raises MissingError if there is none."""

    @abstractmethod
    def read_version(self, key: str) -> tuple[bytes, Version]:
        """All of an object, and which state of it that is. Raises MissingError if there is none."""

    @abstractmethod
    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` - 1 of an object; fewer where it ends before. Raises MissingError if there is none."""

    @abstractmethod
    def blocks(self, key: str) -> Iterator[Block]:
        """All of an object, some hundred KiB at a time, as they come. Raises MissingError if there is none; an answer that
        breaks off raises after what came of it."""

    @abstractmethod
    def look_up(self, key: str) -> Stored:
        """An object as a listing has it. Raises MissingError if there is none."""

    def size(self, key: str) -> int:
        """Length in bytes. Raises MissingError if there is none."""
        return self.look_up(key).bytes

    def fetch(self, stored: Stored, path: Path, after_block: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Make or replace the file `path` with an object. What comes cut short is asked for again.

        `after_block`: told the bytes of each block; those that come again are told as none. Raises DamagedError if what
        comes has another length than the listing says, OSError."""
        failure: StorageError | None = None
        reported = 0
        for attempt in range(READS):
            time.sleep(PAUSE_SECONDS * (attempt > 0))
            try:
                with open(path, "wb") as file:
                    for block in self.blocks(stored.key):
                        file.write(block)
                        after_block(max(0, file.tell() - reported))
                        reported = max(reported, file.tell())
                    size = file.tell()
                    file.flush()
                    os.fsync(file.fileno())
            except (MissingError, RefusedError):
                raise
            except StorageError as error:
                failure = error
                continue
            if size == stored.bytes:
                return
            failure = DamagedError(f"{self.where(stored.key)} came as {size:,} bytes, expected {stored.bytes:,}. Try again.")
        assert failure is not None
        raise failure

    @abstractmethod
    def write(self, key: str, data: bytes | memoryview) -> None:
        """Make or replace an object. It can be read here at once, elsewhere after the next `flush`, `publish` or `remove`."""

    @abstractmethod
    def write_file(self, key: str, path: Path) -> None:
        """Make or replace an object with what a file holds, however large. Raises OSError if the file cannot be read."""

    @abstractmethod
    def publish(self, key: str, data: bytes, *, replacing: Version | None) -> Version:
        """Make an object, or replace that state of it; the new state. Raises ConflictError if it is there already, or is in
        another state. Done again after an answer was lost, it succeeds: what is there is the same then."""

    def hold(self, key: str, version: Version) -> None:  # noqa: B027 - most stores cannot ask for it
        """Let nothing more that is written here appear once this object is in another state: what would show it raises
        ConflictError. Stores that cannot ask so together with a write do as ever."""

    @abstractmethod
    def names(self, prefix: str) -> tuple[list[Stored], list[str]]:
        """Objects right under the folder `prefix`, and names of the folders there, both by their own names."""

    @abstractmethod
    def walk(self, prefix: str) -> Iterator[Stored]:
        """Every object anywhere under the folder `prefix`, by its key."""

    def files(self) -> list[Stored]:
        """Every object, apart from the markers of folders that consoles make: empty, and named as a folder is."""
        objects = list(self.walk(""))
        folders = {str(above) for stored in objects for above in PurePosixPath(stored.key).parents} | {""}
        return [stored for stored in objects if stored.bytes or stored.key not in folders]

    @abstractmethod
    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; those that are not there are passed over."""

    def flush(self) -> None:  # noqa: B027 - most stores have nothing to do
        """See that all that was written can be read by others. Where each write can at once there is nothing to do."""

    def take_pending(self) -> dict[str, Any]:
        """Writes that others cannot read yet, JSON-able, for another process's `add_pending`: whatever that one publishes next
        shows them. None where each write can be read at once."""
        return {}

    def add_pending(self, pending: dict[str, Any]) -> None:
        """Take over what another process has written to this store, and could not be read yet."""
        assert not pending

    def expect_usable(self, probe: str) -> None:
        """Prove that objects can be written, read, listed and removed here, with one of the name `probe`."""
        content = probe.encode()
        self.write(probe, content)
        if self.read(probe) != content:
            raise DamagedError(f"{self.where(probe)} does not hold what was just written there. Choose another store.")
        self.names("")
        self.remove([probe])
