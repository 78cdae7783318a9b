"""`Store`: the only interface to stored files. Keys are relative and joined by `/`.

Readers see an object complete or not at all. Nothing is ever renamed: a set of objects that must appear atomically is written
first, and then an object that names them, which `publish` writes conditionally.
"""

from __future__ import annotations

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

from ultrascale.storage.errors import DamagedError, MissingError, RefusedError, StorageError

Block: TypeAlias = bytes | memoryview
READS = 3
"""Attempts to read a response that breaks off; requests without a response are retried below this level."""
PAUSE_SECONDS = 0.2
T = TypeVar("T")


def with_retries(read: Callable[[], T]) -> T:
    """Result of `read`; what breaks off or arrives damaged is requested again, READS times in all."""
    for attempt in range(1, READS + 1):
        try:
            return read()
        except (MissingError, RefusedError):
            raise
        except StorageError:
            if attempt == READS:
                raise
            time.sleep(PAUSE_SECONDS)
    raise AssertionError


@dataclass(frozen=True)
class Version:
    """One version of an object: its content tag, and where the store numbers versions, the number."""

    tag: str
    number: str | None = None

    @classmethod
    def of(cls, data: bytes) -> Version:
        """The version of a store that gives its objects no tags."""
        return cls(hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Stored:
    """An object of a listing."""

    key: str
    bytes: int
    tag: str = ""
    """Text that changes with the content."""


class Store(ABC):
    """Storage of objects. All methods are thread-safe, and raise StorageError."""

    url: str
    """URL as a user writes it, without a trailing `/`."""
    listings_lag = True
    """False if every listing shows everything published before it."""

    def where(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{key}"

    @abstractmethod
    def read(self, key: str) -> bytes:
        """All of an object. Raises MissingError if there is none."""

    @abstractmethod
    def read_version(self, key: str) -> tuple[bytes, Version]:
        """All of an object, and its version. Raises MissingError if there is none."""

    @abstractmethod
    def read_range(self, key: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` - 1 of an object; fewer if it ends earlier. Raises MissingError if there is none."""

    @abstractmethod
    def blocks(self, key: str) -> Iterator[Block]:
        """Stream an object in blocks of some hundred KiB. Raises MissingError if there is none; a response that breaks off
        raises after the blocks that arrived."""

    @abstractmethod
    def look_up(self, key: str) -> Stored:
        """An object's entry as in a listing. Raises MissingError if there is none."""

    def size(self, key: str) -> int:
        """Length in bytes. Raises MissingError if there is none."""
        return self.look_up(key).bytes

    def fetch(self, stored: Stored, path: Path, after_block: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write an object to the file `path`, replacing it. A truncated response is requested again.

        `after_block`: called with the bytes of each block; repeated blocks do not count. Raises DamagedError if the length
        differs from the listing's, OSError.
        """
        reported = 0

        def read() -> None:
            nonlocal reported
            with open(path, "wb") as file:
                for block in self.blocks(stored.key):
                    file.write(block)
                    after_block(max(0, file.tell() - reported))
                    reported = max(reported, file.tell())
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())
            if size != stored.bytes:
                raise DamagedError(f"{self.where(stored.key)} came as {size:,} bytes, expected {stored.bytes:,}. Try again.")

        with_retries(read)

    @abstractmethod
    def write(self, key: str, data: bytes | memoryview) -> None:
        """Create or replace an object. This process can read it at once, others after the next `flush`, `publish` or
        `remove`."""

    @abstractmethod
    def write_file(self, key: str, path: Path) -> None:
        """Create or replace an object with the content of a file of any size. Raises OSError if the file cannot be read."""

    @abstractmethod
    def publish(self, key: str, data: bytes, *, replacing: Version | None) -> Version:
        """Create an object, or replace that version of it; returns the new version. Raises ConflictError if it already exists,
        or has another version. A retry after a lost response succeeds, because the content is then the same."""

    def hold(self, key: str, version: Version) -> None:  # noqa: B027 - most stores cannot ask for it
        """Make later writes conditional on the version of this object: once it has changed, operations that would make them
        visible raise ConflictError. No effect on stores without such a condition."""

    @abstractmethod
    def names(self, prefix: str) -> tuple[list[Stored], list[str]]:
        """Objects directly under the folder `prefix`, and the names of its subfolders."""

    @abstractmethod
    def walk(self, prefix: str) -> Iterator[Stored]:
        """Every object at any depth under the folder `prefix`, by its key."""

    def files(self) -> list[Stored]:
        """Every object, except empty ones named like a folder, which web consoles create as markers."""
        objects = list(self.walk(""))
        folders = {str(above) for stored in objects for above in PurePosixPath(stored.key).parents} | {""}
        return [stored for stored in objects if stored.bytes or stored.key not in folders]

    @abstractmethod
    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored."""

    def flush(self) -> None:  # noqa: B027 - most stores have nothing to do
        """Make all writes visible to others. No effect where each write is visible at once."""

    def take_pending(self) -> dict[str, Any]:
        """Writes that others cannot read yet, JSON-able, for another process's `add_pending`; its next publish makes them
        visible. Empty where each write is visible at once."""
        return {}

    def add_pending(self, pending: dict[str, Any]) -> None:
        """Take over another process's writes to this store that are not visible yet."""
        assert not pending

    def expect_usable(self, probe: str) -> None:
        """Test that objects can be written, read, listed and removed here, with a test object named `probe`."""
        content = probe.encode()
        self.write(probe, content)
        if self.read(probe) != content:
            raise DamagedError(f"{self.where(probe)} does not hold what was just written there. Choose another store.")
        self.names("")
        self.remove([probe])
