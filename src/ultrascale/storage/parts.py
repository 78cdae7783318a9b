"""A large file as parts: objects of 32 MiB, each named by its place and checksum, and each read back against that.

Why not a store's own multipart upload: what a killed one leaves cannot be seen in a listing, every vendor ends one in another
way, and nothing of it can be gone on with. A part is an object like any other: it is sent again alone, found again by its name
after a kill, listed and collected by its prefix, and checked alone. The file is its parts end to end.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ultrascale.failpoints import failpoint
from ultrascale.storage.errors import DamagedError, MissingError
from ultrascale.storage.store import Store

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

PART_BYTES = 32 << 20
STREAMS = 8
"""Parts on their way at once, so that 256 MiB of memory are used at most."""
READS = 3
PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class Part:
    """One object of a file: its length, and the CRC-32 of its bytes."""

    bytes: int
    crc: int

    def key(self, prefix: str, index: int) -> str:
        """Key of the part, unique to its content."""
        return f"{prefix}.{index:05d}-{self.crc:08x}"


def upload_file(store: Store, path: Path, prefix: str, *, resuming: bool = False) -> tuple[tuple[Part, ...], int]:
    """Write the file's parts under `prefix`; what they are, and the CRC-32 of the whole file as it was read.

    `resuming`: some may be there from an attempt that was cut off; they are not sent again. Raises StorageError, OSError."""
    parts: list[Part] = []
    whole = 0

    def send(key: str, data: bytes) -> None:
        if not (resuming and _is_there(store, key, len(data))):
            store.write(key, data)
        failpoint("upload.part")

    with open(path, "rb") as file, ThreadPoolExecutor(STREAMS, "upload") as pool:
        sent: deque[Future[None]] = deque()
        try:
            while data := file.read(PART_BYTES):
                part = Part(len(data), crc32(data) & 0xFFFFFFFF)
                whole = crc32(data, whole)
                sent.append(pool.submit(send, part.key(prefix, len(parts)), data))
                parts.append(part)
                if len(sent) >= STREAMS:
                    sent.popleft().result()
            while sent:
                sent.popleft().result()
        finally:
            for one in sent:
                one.cancel()
    return tuple(parts), whole & 0xFFFFFFFF


def download_file(store: Store, parts: Sequence[Part], prefix: str, path: Path) -> None:
    """Make the file `path` of its parts, each checked, and fsync it. Raises StorageError, OSError; then there is no file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        at = 0
        for data in read_parts(store, parts, prefix):
            view = memoryview(data)
            while view:
                done = os.pwrite(fd, view, at)
                view, at = view[done:], at + done
            failpoint("download.part")
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def read_parts(store: Store, parts: Sequence[Part], prefix: str) -> Iterator[bytes]:
    """The bytes of one part after the other, checked, several fetched ahead. Raises DamagedError, StorageError."""
    with ThreadPoolExecutor(STREAMS, "download") as pool:
        waiting: deque[Future[bytes]] = deque()
        keys = ((part.key(prefix, index), part) for index, part in enumerate(parts))
        try:
            for key, part in keys:
                waiting.append(pool.submit(_checked, store, key, part))
                if len(waiting) >= STREAMS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


def _checked(store: Store, key: str, part: Part) -> bytes:
    """A part that comes cut short or changed on the way is asked for again."""
    problem = ""
    for attempt in range(READS):
        time.sleep(PAUSE_SECONDS * (attempt > 0))
        try:
            data = store.read(key)
        except MissingError as error:
            raise DamagedError(f"{store.where(key)} is missing. Use another checkpoint.") from error
        problem = _problem(data, part)
        if not problem:
            return data
    raise DamagedError(f"{store.where(key)}: {problem}. Use another checkpoint.")


def _problem(data: bytes, part: Part) -> str:
    if len(data) != part.bytes:
        return f"{len(data)} bytes long, expected {part.bytes}"
    found = crc32(data) & 0xFFFFFFFF
    return "" if found == part.crc else f"checksum is crc32:{found:08x}, expected crc32:{part.crc:08x}"


def _is_there(store: Store, key: str, size: int) -> bool:
    try:
        return store.size(key) == size
    except MissingError:
        return False
