"""A large file as parts: objects of 16 MiB, each named by its index and checksum, and verified against it when read.

Why not a store's own multipart upload: leftovers of a killed one are invisible in a listing, every vendor ends one differently,
and it cannot be resumed. A part is an ordinary object: it is retried alone, found by its name after a kill, listed and removed
by its prefix, and verified alone. The file is the concatenation of its parts.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ultrascale.failpoints import failpoint
from ultrascale.storage.checksum import combine_crc32, crc32
from ultrascale.storage.errors import DamagedError, MissingError
from ultrascale.storage.store import Block, Store, with_retries

T = TypeVar("T")
U = TypeVar("U")

PART_BYTES = 16 << 20
"""Parts of 32 MiB cost both sides a third more CPU time: less of a part is still in cache at its second use."""
STREAMS = 8
"""Parts in flight at once. Uploads hold whole parts, 128 MiB at most; downloads stream in small blocks."""


@dataclass(frozen=True)
class PartObject:
    """One object of a file: its length, and the CRC-32 of its bytes."""

    bytes: int
    crc: int

    def key(self, prefix: str, index: int) -> str:
        """Key of the part, unique to its content."""
        return f"{prefix}.{index:05d}-{self.crc:08x}"


def crc_of(parts: Iterable[PartObject]) -> int:
    """CRC-32 of the file that these parts make up."""
    crc = 0
    for part in parts:
        crc = combine_crc32(crc, part.crc, part.bytes)
    return crc


def upload_file(store: Store, path: Path, prefix: str, *, resuming: bool = False) -> tuple[PartObject, ...]:
    """Upload the file's parts under `prefix`; returns the parts as read from the file.

    `resuming`: parts that an interrupted attempt has uploaded are not sent again. Raises StorageError, OSError.
    """

    size = path.stat().st_size
    free: list[mmap.mmap] = []  # to touch fresh memory costs as much as to send what it holds

    def send(index: int) -> PartObject:
        try:
            buffer = free.pop()
        except IndexError:
            buffer = mmap.mmap(-1, min(size, PART_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with open(path, "rb") as file:
            file.seek(index * PART_BYTES)
            data = memoryview(buffer)[: file.readinto(buffer)]
        part = PartObject(len(data), crc32(data) & 0xFFFFFFFF)
        key = part.key(prefix, index)
        if not (resuming and _is_there(store, key, part.bytes)):
            store.write(key, data)
        failpoint("upload.part")
        with suppress(BufferError, SystemError):  # an abandoned connection may still be reading from it
            data.release()
            buffer.resize(len(buffer))  # refused while anybody holds it; some systems never can
            free.append(buffer)
        return part

    return tuple(_in_parallel(send, range(-(-size // PART_BYTES))))


def download_files(store: Store, files: Mapping[Path, tuple[str, Sequence[PartObject]]]) -> None:
    """Write each file from its verified parts, and fsync it; `files` gives prefix and parts of each.

    Raises StorageError, OSError; then none of them exists.
    """
    created: list[Path] = []
    try:
        for path in files:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            created.append(path)
        _in_parallel(
            lambda piece: _download_part(store, *piece),
            [(path, *piece) for path, (prefix, parts) in files.items() for piece in _placed(prefix, parts)],
        )
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.unlink()
        raise


def verify_parts(store: Store, files: Mapping[str, Sequence[PartObject]]) -> None:
    """Read every part and compare it with its checksum; `files` gives the parts of each prefix.

    Raises DamagedError naming the first that differs, StorageError."""
    placed = [piece for prefix, parts in files.items() for piece in _placed(prefix, parts)]
    _in_parallel(lambda piece: _read_part(store, piece[0], piece[1], lambda block, at: None), placed)


def read_parts(store: Store, parts: Sequence[PartObject], prefix: str) -> bytes:
    """A file that fits in memory, checked. Raises DamagedError, StorageError."""
    data = bytearray(sum(part.bytes for part in parts))
    for key, part, begin in _placed(prefix, parts):

        def put(block: Block, offset: int, begin: int = begin) -> None:
            data[begin + offset : begin + offset + len(block)] = block

        _read_part(store, key, part, put)
    return bytes(data)


def _in_parallel(work: Callable[[T], U], items: Iterable[T]) -> list[U]:
    """Results in the order of the items. The first failure is raised; work that has not started by then is cancelled."""
    with ThreadPoolExecutor(STREAMS, "parts") as pool:
        return list(pool.map(work, items))


def _placed(prefix: str, parts: Sequence[PartObject]) -> list[tuple[str, PartObject, int]]:
    """Each part with its key, and its offset in the file."""
    pieces, offset = [], 0
    for index, part in enumerate(parts):
        pieces.append((part.key(prefix, index), part, offset))
        offset += part.bytes
    return pieces


def _download_part(store: Store, path: Path, key: str, part: PartObject, begin: int) -> None:
    """Write a part at its offset in a file, and start its way to disk while others still arrive."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)

    def put(block: Block, offset: int) -> None:
        view = memoryview(block)
        while view:
            done = os.pwrite(fd, view, begin + offset)
            view, offset = view[done:], offset + done

    try:
        _read_part(store, key, part, put)
        failpoint("download.part")
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_part(store: Store, key: str, part: PartObject, put: Callable[[Block, int], None]) -> None:
    """Call `put` with each block of a part and its offset in the part; verify the part.

    A part that arrives truncated or corrupted is requested again, and passed to `put` again from its start.
    """

    def read() -> None:
        crc, size = 0, 0
        for block in store.blocks(key):
            if size + len(block) <= part.bytes:
                put(block, size)
            crc, size = crc32(block, crc), size + len(block)
        if problem := _problem(size, crc & 0xFFFFFFFF, part):
            raise DamagedError(f"{store.where(key)}: {problem}. Use another checkpoint.")

    try:
        with_retries(read)
    except MissingError as error:
        raise DamagedError(f"{store.where(key)} is missing. Use another checkpoint.") from error


def _problem(size: int, crc: int, part: PartObject) -> str:
    if size != part.bytes:
        return f"{size} bytes long, expected {part.bytes}"
    return "" if crc == part.crc else f"checksum is crc32:{crc:08x}, expected crc32:{part.crc:08x}"


def _is_there(store: Store, key: str, size: int) -> bool:
    try:
        return store.size(key) == size
    except MissingError:
        return False
