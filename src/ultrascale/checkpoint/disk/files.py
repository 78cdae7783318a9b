"""Bytes on disk: shards are written as a stream, read in ranges, and never reached through a symbolic link.

A shard is a safetensors file (8 bytes of length, a JSON header, raw row-major data). Data are written from the tensor's own
memory, block by block, and each block is checksummed while it is in the CPU cache: that costs a tenth of copying it, and less
than handing it to another thread. Only data from a device or in a non-contiguous layout are copied, one tensor at a time.
Reading works the same way, with the kernel's read-ahead.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.checkpoint.disk.checksum import checksum_text, crc32
from ultrascale.checkpoint.disk.patience import with_retries
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.manifest import (
    HEAD,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Chunk,
    Manifest,
    Shard,
    TensorEntry,
    decode,
)
from ultrascale.failpoints import failpoint

if TYPE_CHECKING:  # listing checkpoints needs no torch
    import torch

BLOCK_BYTES = 1 << 20
"""Small enough for a core's cache, large enough that system calls cost next to nothing."""


@dataclass(frozen=True)
class Piece:
    """The part of one tensor that one rank writes: the box that begins at `offsets` and has the shape of `tensor`."""

    name: str
    shape: tuple[int, ...]
    """Shape of the unsharded tensor."""
    offsets: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def key(self) -> str:
        """Name of the piece inside the safetensors file."""
        if tuple(self.tensor.shape) == self.shape:
            return self.name
        box = ",".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.tensor.shape, strict=True))
        return f"{self.name}[{box}]"


def write_shard(folder: Path, file: str, pieces: list[Piece], *, save_id: str, step: int) -> tuple[Shard, list[int]]:
    """Write `pieces` (any device) to `folder/file` and fsync it. Returns length and checksum, and where each piece begins.

    Rewritten from the start after a transient error. Raises OSError from the disk, FileExistsError if the file exists already.
    """
    # Widest dtype first keeps every tensor aligned, as safetensors' readers expect.
    order = sorted(range(len(pieces)), key=lambda i: -pieces[i].tensor.dtype.itemsize)
    header, data_begins = _header([pieces[i] for i in order], {"save_id": save_id, "step": str(step), "file": file})
    begins = dict(zip(order, (len(header) + begin for begin in data_begins), strict=True))

    def write() -> tuple[int, int]:
        crc, size = 0, 0
        with _created(folder / file) as fd:
            for data in chain([memoryview(header)], (view_bytes(pieces[i].tensor) for i in order)):
                crc, size = _write_blocks(fd, data, crc), size + len(data)
                failpoint("save.block")
        return crc, size

    crc, size = with_retries(write)
    return Shard(size, checksum_text(crc)), [begins[i] for i in range(len(pieces))]


def write_file(path: Path, data: bytes) -> None:
    """Create `path` with `data` and fsync it; starts over after a transient error. Raises OSError, also if the file exists."""

    def write() -> None:
        with _created(path) as fd:
            _write_blocks(fd, memoryview(data))

    with_retries(write)


@contextmanager
def _created(path: Path) -> Iterator[int]:
    """A descriptor of the new file `path`, fsynced at the end. On failure the file is removed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        yield fd
        os.fsync(fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


@contextmanager
def opened(folder: Path, file: str) -> Iterator[int]:
    """A descriptor of the regular file `folder/file`. Raises CheckpointError for links, other file types and errors."""
    path = folder / file
    folder_fd = fd = -1
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        # Non-blocking, so that a pipe in place of a file cannot block us; no effect on a regular file.
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path}: expected a regular file. Use another checkpoint.")
        yield fd
    except OSError as error:
        if folder_fd < 0:
            problem = (
                f"{folder}: cannot be opened as a folder that is no link ({error.strerror}). Give the checkpoint's own folder."
            )
        else:
            problem = f"{path}: missing or unreadable, links included ({error.strerror}). Use another checkpoint."
        raise CheckpointError(problem) from error
    finally:
        for descriptor in (fd, folder_fd):
            if descriptor >= 0:
                os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked in full. Raises CheckpointError."""
    return decode(with_retries(lambda: _manifest_bytes(folder)), str(folder / MANIFEST_NAME))


def is_understood(folder: Path) -> bool:
    """True if the folder has a manifest that begins as in this format, even if it is damaged further on. A folder without one
    may belong to something else, and must not be removed."""
    try:
        with opened(folder, MANIFEST_NAME) as fd:
            return HEAD.match(os.pread(fd, 4096, 0)) is not None
    except CheckpointError:
        return False


def _manifest_bytes(folder: Path) -> bytes:
    with opened(folder, MANIFEST_NAME) as fd:
        size = os.fstat(fd).st_size
        if size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{folder / MANIFEST_NAME}: {size} bytes, expected at most {MAX_MANIFEST_BYTES}.")
        data = bytearray(size)
        _read_exactly(fd, memoryview(data), 0, folder / MANIFEST_NAME)
    return bytes(data)


def verify_size(folder: Path, file: str, shard: Shard) -> None:
    """Raises CheckpointError unless the file exists with the length in the manifest."""
    with opened(folder, file) as fd:
        _expect_size(fd, folder / file, shard)


def verify_shard(folder: Path, file: str, shard: Shard, save_id: str) -> None:
    """Read the whole file. Raises CheckpointError unless length, save id and checksum match the manifest."""
    with_retries(lambda: _verify_shard(folder, file, shard, save_id))


def _verify_shard(folder: Path, file: str, shard: Shard, save_id: str) -> None:
    path = folder / file
    with opened(folder, file) as fd:
        _expect_size(fd, path, shard)
        _read_ahead(fd)
        block, crc = memoryview(bytearray(min(BLOCK_BYTES, max(shard.bytes, 1)))), 0
        for offset in range(0, shard.bytes, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, shard.bytes - offset)]
            _read_exactly(fd, part, offset, path)
            if offset == 0:
                _expect_save(bytes(part), path, save_id)
            crc = crc32(part, crc)
    if checksum_text(crc) != shard.checksum:
        problem = f"checksum is {checksum_text(crc)}, expected {shard.checksum}: its bytes have changed since it was saved"
        raise CheckpointError(f"{path}: {problem}. Use another checkpoint.")


def read_box(fd: int, entry: TensorEntry, chunk: Chunk, starts: tuple[int, ...], target: torch.Tensor, *, path: Path) -> None:
    """Fill `target` (any device and strides, dtype of `entry`) with the box of its shape at `starts` inside `chunk`.

    Reads one range of bytes, from the box's first element to its last; straight into `target` if the memory layouts agree.
    """
    import torch

    from ultrascale.checkpoint.disk.dtypes import DTYPES

    strides = [prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
    first = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    count = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))
    target = target.detach()
    direct = target.device.type == "cpu" and target.is_contiguous() and count == target.numel()
    run = target.view(-1) if direct else torch.empty(count, dtype=DTYPES[entry.dtype])
    _read_exactly(fd, view_bytes(run), chunk.begin + first * entry.itemsize, path)
    if not direct:
        target.copy_(run.as_strided(tuple(target.shape), strides))


def _header(pieces: list[Piece], about: dict[str, str]) -> tuple[bytes, list[int]]:
    """The safetensors header, length included, and where each piece begins in the following data."""
    from ultrascale.checkpoint.disk.dtypes import DTYPE_NAMES

    entries: dict[str, object] = {"__metadata__": about}
    begins, begin = [], 0
    for piece in pieces:
        if piece.key in entries:
            raise CheckpointError(f"{piece.key}: two tensors would get this name in one shard. Rename one.")
        end = begin + piece.tensor.numel() * piece.tensor.dtype.itemsize
        dtype, shape = DTYPE_NAMES[piece.tensor.dtype], list(piece.tensor.shape)
        entries[piece.key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begins.append(begin)
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins


def view_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's row-major bytes; a view where it is contiguous on the CPU."""
    import torch

    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_blocks(fd: int, data: memoryview, crc: int = 0) -> int:
    """Write `data`. Returns the checksum `crc` of the preceding data, extended over `data`."""
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        crc, written = crc32(block, crc), 0
        while written < len(block):
            written += os.write(fd, block[written:])
    return crc


def _read_exactly(fd: int, buffer: memoryview, begin: int, path: Path) -> None:
    filled = 0
    while filled < len(buffer):
        count = os.preadv(fd, [buffer[filled:]], begin + filled)
        if count == 0:
            raise CheckpointError(
                f"{path}: ends at byte {begin + filled}, expected {begin + len(buffer)}. Use another checkpoint."
            )
        filled += count


def _read_ahead(fd: int) -> None:
    """Ask the kernel to read the file ahead."""
    if hasattr(os, "posix_fadvise"):  # macOS has none
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def _expect_size(fd: int, path: Path, shard: Shard) -> None:
    size = os.fstat(fd).st_size
    if size != shard.bytes:
        raise CheckpointError(f"{path}: {size} bytes long, expected {shard.bytes}. Use another checkpoint.")


def _expect_save(head: bytes, path: Path, save_id: str) -> None:
    """Raises if a shard's header names another save; damage to the header itself is left to the checksum."""
    length = int.from_bytes(head[:8], "little")
    try:
        about = json.loads(head[8 : 8 + length])["__metadata__"]
        other, step = about["save_id"], about["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    if other != save_id:
        problem = f"belongs to save {other!r:.40} of step {step!r:.20}, expected save {save_id!r}"
        raise CheckpointError(f"{path}: {problem}: shards of two checkpoints are mixed. Use another checkpoint.")
