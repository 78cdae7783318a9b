"""Samples of WebDataset and MosaicML Streaming shards, in order; both are read once, from start to end.

    web-0000.tar    files NAME.EXT one after the other; neighbours of one NAME are a sample: 7.txt 7.json, 8.txt 8.json
    shard.0.mds     number of samples n; n + 1 offsets; columns, as JSON; samples, each with its values' lengths first

An archive has an end mark, and a shard's last offset is its length, so that a truncated file of either kind is detected. Memory
holds one sample.
"""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, BinaryIO

from ultrascale.data.files import DataError
from ultrascale.data.reading.judged import REPAIR

MOST_SAMPLES = 1 << 26
"""Most samples of a MDS shard; a larger number is damage."""
LONGEST_COLUMNS = 1 << 20
"""Most bytes of a MDS shard's columns; more are damage."""


class _Member(tarfile.TarInfo):
    """A header that rejects damage; tarfile treats a damaged or missing header as the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> tarfile.TarInfo:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise  # the end mark
            raise tarfile.ReadError(str(error)) from error


def tar_samples(stream: BinaryIO, where: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Name of each sample, and its files by extension. Raises DataError if the archive is damaged or truncated."""
    name, files = "", {}
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, slash, last = member.name.rpartition("/")
                base, _, extension = last.partition(".")
                if f"{folder}{slash}{base}" != name:
                    if files:
                        yield name, files
                    name, files = f"{folder}{slash}{base}", {}
                if extension in files:
                    raise DataError(where, f"has {member.name} twice in one sample", REPAIR, "broken_sample")
                file = archive.extractfile(member)
                assert file is not None
                files[extension] = file.read()
    except tarfile.TarError as error:
        raise DataError(where, f"is damaged, or was cut off: {error}", REPAIR, "damaged_file") from error
    if files:
        yield name, files


def mds_texts(stream: BinaryIO, field: str, where: str) -> Iterator[bytes]:
    """The column `field` of each sample. Raises DataError if the shard is damaged or has no such column of text."""
    (count,) = struct.unpack("<I", _read(stream, 4, where))
    if count > MOST_SAMPLES:
        raise _damaged(where, f"it begins with {count:,} samples")
    offsets = struct.unpack(f"<{count + 1}I", _read(stream, 4 * (count + 1), where))
    head = 4 * (count + 2)
    if not head < offsets[0] <= head + LONGEST_COLUMNS:
        raise _damaged(where, f"its samples begin at byte {offsets[0]:,}")
    names, sizes = _columns(_read(stream, offsets[0] - head, where), field, where)
    wanted = names.index(field)
    for number, (begin, end) in enumerate(pairwise(offsets)):
        if end < begin:
            raise _damaged(where, f"its sample {number} ends before it begins")
        sample = _read(stream, end - begin, where)
        lengths = 4 * sum(size is None for size in sizes)
        head_sizes = iter(struct.unpack_from(f"<{lengths // 4}I", sample) if len(sample) >= lengths else ())
        real = [next(head_sizes, 0) if size is None else size for size in sizes]
        if lengths + sum(real) != len(sample):
            raise _damaged(where, f"its sample {number} has {len(sample):,} bytes, and its values {lengths + sum(real):,}")
        start = lengths + sum(real[:wanted])
        yield sample[start : start + real[wanted]]
    if stream.read(1):
        raise _damaged(where, "bytes follow its last sample")


def _columns(text: bytes, field: str, where: str) -> tuple[list[str], list[int | None]]:
    """Names and sizes of a shard's columns; `field` must be a text column."""
    try:
        facts: dict[str, Any] = json.loads(text)
        names, kinds, sizes = (list(facts[f"column_{key}"]) for key in ("names", "encodings", "sizes"))
        if not len(names) == len(kinds) == len(sizes):
            raise ValueError("names, encodings and sizes differ in number")
        if not all(size is None or (type(size) is int and size >= 0) for size in sizes):
            raise ValueError("a size is no number of bytes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(where, f"its columns cannot be read ({error})") from error
    remedy = "Name the text's column with --field."
    if field not in names:
        raise DataError(where, f"has no column {field!r}, only {', '.join(map(repr, names[:8]))}", remedy, "missing_field")
    if (kind := kinds[names.index(field)]) != "str":
        raise DataError(where, f"column {field!r} holds {kind}, expected str", remedy, "not_text")
    return names, sizes


def _read(stream: BinaryIO, size: int, where: str) -> bytes:
    """Exactly `size` bytes, which may arrive in pieces."""
    content = bytearray()
    while len(content) < size and (piece := stream.read(size - len(content))):
        content += piece
    if len(content) < size:
        raise _damaged(where, "it was cut off")
    return bytes(content)


def _damaged(where: str, what: str) -> DataError:
    return DataError(where, f"is no whole MDS shard: {what}", REPAIR, "damaged_file")
