"""Decompressed bytes of a file, as a stream. Output comes in bounded pieces, and a truncated file is an error, not an end."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ultrascale.data.files import DataError

_INPUT_BYTES = 1024
"""zstd: compressed bytes read at a time. A block of 4 bytes may become 128 KiB, so this bounds a piece to 32 MiB."""


def import_extra(module: str) -> Any:
    """A module of the extra `data`. Raises DataError, naming the package to install, if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        remedy = "Install it: pip install 'ultrascale[data]'."
        raise DataError(package, "is needed to read this kind of file and is not installed", remedy) from error


@contextmanager
def open_bytes(path: Path, compression: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file; yields the decompressed stream, and the raw file, whose position measures progress.

    Reads may raise errors that `damage` recognises.
    """
    with open(path, "rb") as raw:
        if compression == "gz":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream, raw  # type: ignore[misc]
        elif compression == "zst":
            yield io.BufferedReader(_Zstd(raw), 1 << 20), raw
        else:
            yield raw, raw


def damage(error: Exception) -> str | None:
    """A description of the damage if `error` comes from reading a damaged or unreadable file; else None."""
    if isinstance(error, EOFError):
        return "ends in the middle of its compressed data"
    if isinstance(error, gzip.BadGzipFile | zlib.error) or type(error).__name__ == "ZstdError":
        return f"is damaged or not compressed as its name says: {error}"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return None


class _Zstd(io.RawIOBase):
    """Concatenated zstd frames. python-zstandard's stream reader treats a truncated file as complete."""

    def __init__(self, file: BinaryIO):
        self._new_frame = import_extra("zstandard").ZstdDecompressor().decompressobj
        self._file, self._frame = file, self._new_frame()
        self._rest, self._input, self._inside = memoryview(b""), b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            self._input = self._input or self._file.read(_INPUT_BYTES)
            if not self._input:
                if self._inside:
                    raise EOFError
                return 0
            if self._frame.eof:
                self._frame = self._new_frame()
            self._rest = memoryview(self._frame.decompress(self._input))
            self._inside, self._input = not self._frame.eof, self._frame.unused_data
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count
