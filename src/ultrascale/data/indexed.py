"""Megatron's `.bin/.idx` pair: `.bin` holds concatenated token ids, `.idx` where each sequence and document begins.

    .idx     9 bytes  magic, "MMIDIDX" and two zeros
             u64      version, 1                       u8   dtype of the ids (1 uint8 ... 8 uint16)
             u64      n sequences                      u64  length of the document index
             i32[n]   lengths in tokens                i64[n]  positions in .bin in bytes
             i64[d]   first sequence of each document, and n at the end

Little-endian throughout; the arrays start at byte 34, so the 64-bit ones are not aligned. NumPy copies a whole unaligned array
to search it; `bisect` on a memoryview touches a few pages. Source: Megatron-LM, `core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ultrascale.data.files import PARTIAL, DataError, writing
from ultrascale.failpoints import failpoint

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODE_OF_DTYPE = {name: code for code, name in DTYPE_CODES.items()}
LONGEST_DOCUMENT = 2**31 - 1
_BLOCK = 1 << 20
_BOTH = "Check the path; both .bin and .idx are needed."
_AGAIN = "Copy it again from where it was made, or prepare the data again."


def best_dtype(vocab_size: int) -> str:
    """Megatron's rule: uint16 below 65,500 ids, else int32."""
    return "uint16" if vocab_size < 65500 else "int32"


@dataclass(frozen=True)
class Header:
    """The header of an `.idx`."""

    dtype: str
    num_sequences: int
    num_document_entries: int

    @property
    def num_documents(self) -> int:
        return max(0, self.num_document_entries - 1)

    @property
    def index_bytes(self) -> int:
        return HEADER.size + 12 * self.num_sequences + 8 * self.num_document_entries


def prefix_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The `.bin` and `.idx` of a prefix."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def read_header(path: Path) -> Header:
    """Reads and validates the header of an `.idx`. Raises DataError if it is not one, not of token ids, or has another size."""
    try:
        with open(path, "rb") as file:
            raw, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(str(path), f"cannot be read: {error.strerror}", _BOTH) from error
    if len(raw) < HEADER.size or not raw.startswith(MAGIC):
        raise DataError(str(path), f"is not a Megatron index: it starts with {raw[:9]!r}, not {MAGIC!r}", _AGAIN)
    _, version, code, num_sequences, entries = HEADER.unpack(raw)
    if version != VERSION:
        other = " (big-endian)" if version == VERSION << 56 else ""
        raise DataError(str(path), f"has version {version}{other}, expected {VERSION}", "Convert it with Megatron's own tools.")
    dtype = DTYPE_CODES.get(code, "")
    if np.dtype(dtype or "float64").kind not in "iu":
        raise DataError(str(path), f"has dtype code {code} ({dtype or 'unknown'}), which is no token id", _AGAIN)
    header = Header(dtype, num_sequences, entries)
    if size != header.index_bytes:
        raise DataError(str(path), f"is {size} bytes, its header promises {header.index_bytes}", _AGAIN)
    return header


class IndexedShard:
    """One open `.bin/.idx` pair, read-only and memory-mapped.

    Raises DataError if a file is missing or invalid, or the size of `.bin` does not match `.idx`.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, self.idx_path = prefix_paths(prefix)
        self.header = read_header(self.idx_path)
        self.dtype = np.dtype(self.header.dtype).newbyteorder("<")
        size = self._bin_size()
        self._bin, self._idx = self._map_ids(size), _map(self.idx_path, self.header.index_bytes)
        self.tokens: npt.NDArray[Any] = np.frombuffer(self._bin, self.dtype)
        raw = memoryview(self._idx)
        self._lengths_at = HEADER.size
        self._pointers_at = self._lengths_at + 4 * self.header.num_sequences
        self._documents_at = self._pointers_at + 8 * self.header.num_sequences
        self._raw = raw
        self._pointers = raw[self._pointers_at : self._documents_at].cast("q")
        self._documents = raw[self._documents_at :].cast("q")
        self._check_ends(size)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return self.header.num_documents

    def expect_whole(self) -> None:
        """Raises DataError if a file was truncated since it was opened: reading on would end the process by SIGBUS, without a
        message. Costs two calls of fstat."""
        for path, mapped in ((self.bin_path, self._bin), (self.idx_path, self._idx)):
            if isinstance(mapped, mmap.mmap) and mapped.size() < len(mapped):
                problem = f"is {mapped.size()} bytes, and was {len(mapped)} when this run opened it"
                raise DataError(str(path), problem, "Put it back as it was, and go on from the newest checkpoint.")

    def document_starts(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Offsets, in tokens, of the documents that begin at tokens first..last-1."""
        size = self.dtype.itemsize
        low = bisect_left(self._pointers, first * size)
        high = bisect_left(self._pointers, last * size, low)
        low = bisect_left(self._documents, low)
        high = bisect_left(self._documents, high, low)
        sequences = self._part(self._documents_at, "<i8", low, high)
        return self._part(self._pointers_at, "<i8", 0, self.header.num_sequences)[sequences] // size

    def document(self, number: int) -> npt.NDArray[Any]:
        """The token ids of one document. Raises IndexError if there is no such document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"{self.bin_path} has documents 0 to {self.num_documents - 1}, not {number}")
        ends = []
        for sequence in self._documents[number : number + 2]:
            inside = sequence < self.header.num_sequences
            ends.append(self._pointers[sequence] // self.dtype.itemsize if inside else self.num_tokens)
        return self.tokens[ends[0] : ends[1]]

    def verify_index(self) -> None:
        """Reads the whole index in blocks. Raises DataError, with the position, if sequences are not contiguous."""
        expected, n = 0, self.header.num_sequences
        for first in range(0, n, _BLOCK):
            lengths = self._part(self._lengths_at, "<i4", first, min(n, first + _BLOCK)).astype(np.int64)
            pointers = self._part(self._pointers_at, "<i8", first, min(n, first + _BLOCK))
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            wrong = (lengths < 0) | (pointers != np.concatenate(([expected], ends[:-1])))
            if wrong.any():
                position = first + int(np.argmax(wrong))
                raise DataError(f"{self.idx_path}, sequence {position}", "does not begin where the one before ends", _AGAIN)
            expected = int(ends[-1])
        last = 0
        for first in range(0, len(self._documents), _BLOCK):
            documents = self._part(self._documents_at, "<i8", first, min(len(self._documents), first + _BLOCK))
            wrong = np.diff(documents, prepend=last) < 0
            if wrong.any():
                raise DataError(f"{self.idx_path}, document {first + int(np.argmax(wrong))}", "begins before the last", _AGAIN)
            last = int(documents[-1])

    def verify_ids(self, vocab_size: int) -> None:
        """Reads all ids in blocks. Raises DataError with the position of an id outside 0..vocab_size-1."""
        for first in range(0, self.num_tokens, _BLOCK):
            self.check_ids(first, min(self.num_tokens, first + _BLOCK), vocab_size)

    def check_ids(self, first: int, last: int, vocab_size: int) -> None:
        """Raises DataError with the position if one of first..last-1 is not in 0..vocab_size-1."""
        ids = self.tokens[first:last].astype(np.int64)
        wrong = (ids < 0) | (ids >= vocab_size)
        if wrong.any():
            position = int(np.argmax(wrong))
            where = f"{self.bin_path}, token {first + position} (byte {(first + position) * self.dtype.itemsize})"
            remedy = "Use the tokenizer the data was prepared with, or a model with a vocabulary that holds it."
            raise DataError(where, f"id {ids[position]} is not in 0 to {vocab_size - 1}, the model's vocabulary", remedy)

    def _part(self, offset: int, dtype: str, first: int, last: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._raw, dtype, last - first, offset + first * np.dtype(dtype).itemsize)

    def _bin_size(self) -> int:
        try:
            size = self.bin_path.stat().st_size
        except OSError as error:
            raise DataError(str(self.bin_path), f"cannot be read: {error.strerror}", _BOTH) from error
        if size % self.dtype.itemsize:
            raise DataError(str(self.bin_path), f"is {size} bytes, which is no number of {self.header.dtype} ids", _AGAIN)
        return size

    def _map_ids(self, size: int) -> mmap.mmap | bytes:
        return _map(self.bin_path, size)

    def _check_ends(self, size: int) -> None:
        n, promised = self.header.num_sequences, 0
        if n:
            promised = self._pointers[-1] + int(self._part(self._lengths_at, "<i4", n - 1, n)[0]) * self.dtype.itemsize
        if promised != size:
            raise DataError(str(self.bin_path), f"is {size} bytes, its index promises {promised}", _AGAIN)
        if len(self._documents) and (self._documents[0] != 0 or self._documents[-1] != n):
            problem = f"has documents over sequences {self._documents[0]} to {self._documents[-1]}, expected 0 to {n}"
            raise DataError(str(self.idx_path), problem, _AGAIN)


def _map(path: Path, size: int) -> mmap.mmap | bytes:
    """The first `size` bytes of a file, mapped read-only; an empty file cannot be mapped."""
    if not size:
        return b""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


@dataclass(frozen=True)
class Written:
    """Facts about a finished shard."""

    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str


class ShardWriter:
    """Writes one shard, document by document. Files get their final names only in `finish`. Memory: 4 bytes per document.

    Raises DataError, naming the file, if the disk is full or the folder is not writable.
    """

    def __init__(self, prefix: str | Path, dtype: str):
        self.bin_path, self.idx_path = prefix_paths(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._lengths = array("i")
        self._length = 0
        self._digest = self._whole = hashlib.sha256()
        with writing(self.bin_path):
            self._file = open(self._partial(self.bin_path), "wb")  # noqa: SIM115 (closed by finish and discard)

    def append(self, ids: npt.ArrayLike) -> None:
        """Appends ids to the current document."""
        content = np.asarray(ids, self.dtype)
        if self._length == 0:
            self._whole = self._digest.copy()
        self._length += len(content)
        if self._length > LONGEST_DOCUMENT:
            raise DataError(str(self.bin_path), "a document has more than 2^31-1 tokens, the format's limit", "Split it.")
        with writing(self.bin_path):
            self._file.write(content.data)
        self._digest.update(content.data)

    def end_document(self) -> None:
        """Completes the current document."""
        self._lengths.append(self._length)
        self._length = 0

    def abandon_document(self) -> None:
        """Discards ids appended since the last complete document."""
        if self._length:
            with writing(self.bin_path):
                self._file.seek(-self._length * self.dtype.itemsize, os.SEEK_CUR)
                self._file.truncate()
            self._digest, self._length = self._whole, 0

    def add_documents(self, ids: npt.ArrayLike, lengths: Iterable[int]) -> None:
        """Adds complete documents, concatenated in `ids`."""
        self.append(ids)
        self._length = 0
        self._lengths.extend(lengths)

    def finish(self) -> Written:
        """Makes both files durable, then renames them."""
        assert self._length == 0, "a document was not ended"
        lengths = np.frombuffer(self._lengths, "i4") if self._lengths else np.empty(0, "i4")
        tokens = int(lengths.sum(dtype=np.int64))
        with writing(self.bin_path):
            _make_durable(self._file)
        with writing(self.idx_path), open(self._partial(self.idx_path), "wb") as index:
            idx_digest = self._write_index(index, lengths)
            _make_durable(index)
        failpoint("shard.written")
        with writing(self.bin_path):
            for path in (self.bin_path, self.idx_path):
                os.replace(self._partial(path), path)
                failpoint("shard.renamed")
        return Written(len(lengths), tokens, self._digest.hexdigest(), idx_digest)

    def discard(self) -> None:
        """Removes unfinished files. Safe to call at any time."""
        with suppress(OSError):  # a full disk refuses the buffered rest as well; the file goes away anyhow
            self._file.close()
        for path in (self.bin_path, self.idx_path):
            self._partial(path).unlink(missing_ok=True)

    def _partial(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")

    def _write_index(self, file: BinaryIO, lengths: npt.NDArray[np.int32]) -> str:
        digest, n = hashlib.sha256(), len(lengths)

        def put(content: bytes | memoryview) -> None:
            file.write(content)
            digest.update(content)

        put(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype.name], n, n + 1))
        put(lengths.astype("<i4").data)
        position = 0
        for first in range(0, n, _BLOCK):
            ends = position + np.cumsum(lengths[first : first + _BLOCK], dtype="<i8") * self.dtype.itemsize
            put(np.concatenate((np.array([position], "<i8"), ends[:-1])).data)
            position = int(ends[-1])
        for first in range(0, n + 1, _BLOCK):
            put(np.arange(first, min(n + 1, first + _BLOCK), dtype="<i8").data)
        return digest.hexdigest()


def _make_durable(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
