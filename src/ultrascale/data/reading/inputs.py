"""Choice of the files to read, and their split into shards: decided from names and sizes alone, before anything is read.

A shard is the unit of work and of restart: one process makes it from a list of parts, streaming. A part is a whole file, or a
range of bytes of a JSONL file, or a range of row groups of a Parquet file. A shard takes clamp(total / 256, 2 MiB, 256 MiB) of
input, so that there are enough shards to distribute but not too many files; the number of processes does not matter.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

from ultrascale.data.files import DataCommandError, DataError
from ultrascale.data.reading.compressed import import_extra

Kind = Literal["text", "jsonl", "parquet", "csv", "arrow", "tar", "mds"]
Compression = Literal["", "gz", "zst"]
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
    ".arrow": "arrow", ".tar": "tar", ".tgz": "tar", ".mds": "mds",
}  # fmt: skip
"""Kind by a name's suffix, without that of a compression; all other files are text."""
COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".tgz": "gz", ".zst": "zst", ".zstd": "zst"}
SIDES: dict[str, Kind] = {
    "index.json": "mds",
    "dataset_info.json": "arrow",
    "state.json": "arrow",
    "dataset_dict.json": "arrow",
}
"""Index files of a kind's shards, which hold no text themselves."""
DESCRIPTORS = ("/dev/fd", "/proc/self/fd")
"""Folders of a process's open files, whose names are numbers."""
SMALLEST_SHARD, LARGEST_SHARD, USUAL_NUM_SHARDS = 2 << 20, 256 << 20, 256


@dataclass(frozen=True)
class InputFile:
    """One file to read, as it was when shards were planned."""

    path: Path
    name: str
    """Relative to the folder in which it was found; with the place inside, it decides which documents are held out."""
    kind: Kind
    compression: Compression
    size: int
    mtime_ns: int
    url: str = ""
    """URL that it was downloaded from; empty for a local file."""

    def facts(self) -> dict[str, Any]:
        """The facts that must be unchanged for a restart."""
        return {"file": self.url or str(self.path), "size": self.size, "mtime_ns": self.mtime_ns}


@dataclass(frozen=True)
class FilePart:
    """A range of a file: bytes for JSONL, row groups for Parquet, otherwise all of it."""

    file: InputFile
    start: int
    end: int
    weight_bytes: int
    """Bytes of the file on disk that this part represents, for progress and for splitting."""

    def facts(self) -> dict[str, Any]:
        return {**self.file.facts(), "start": self.start, "end": self.end}


def find_files(
    inputs: Iterable[str | Path], *, glob: str = "*", exclude: tuple[str, ...] = (), urls: Mapping[Path, str] | None = None
) -> list[InputFile]:
    """The files named, and those under the folders named whose name matches `glob`, in order of name.

    `exclude`: patterns of file and folder names that are skipped below a folder. Links are followed, to each file and folder
    once. `urls`: source URL of each downloaded input. Raises DataError if an input is missing, unreadable, named twice, or
    nothing matches.
    """
    files: list[InputFile] = []
    seen: set[tuple[int, int]] = set()
    for item in map(Path, inputs):
        paths = list(_walk(item, glob, exclude)) if item.is_dir() else [(item, item.name)]
        if not paths:
            raise DataCommandError(str(item), f"holds no file that matches {glob!r}", "Give another folder or --glob.")
        url, described = (urls or {}).get(item), dict[tuple[int, int], InputFile]()
        for path, name in paths:
            file, identity = _describe(path, name)
            if url is not None:
                file = replace(file, url=f"{url}/{name}" if item.is_dir() else url)
            if identity in seen:
                raise DataCommandError(str(path), "is given twice", "Name every file once; a folder includes its files.")
            first = described.setdefault(identity, file)  # a folder may hold links to its own files
            if (first.kind, first.compression) != (file.kind, file.compression):
                rule = f"is {first.path} by a link, and their names tell different formats"
                raise DataCommandError(str(path), rule, "Leave one of them out: --glob or --exclude.")
        seen |= described.keys()
        files += described.values()
    files = list(_without_sides(files))
    if not files:
        raise DataCommandError("INPUT", "names no file", "Give files, or folders of them; docs/data.md lists the formats.")
    return files


def cut_shards(files: list[InputFile], shard_bytes: int | None = None) -> list[tuple[FilePart, ...]]:
    """The parts of each shard, in order. `shard_bytes`: input of one shard; None: by the rule at the top of this file."""
    total = sum(file.size for file in files)
    size = shard_bytes or min(max(total // USUAL_NUM_SHARDS, SMALLEST_SHARD), LARGEST_SHARD)
    shards: list[tuple[FilePart, ...]] = []
    parts: list[FilePart] = []
    weight = 0
    for part in chain.from_iterable(_cut_file(file, size) for file in files):
        if parts and weight + part.weight_bytes > size:
            shards.append(tuple(parts))
            parts, weight = [], 0
        parts.append(part)
        weight += part.weight_bytes
    return [*shards, tuple(parts)]


def _cut_file(file: InputFile, size: int) -> Iterator[FilePart]:
    if file.kind == "parquet":
        yield from _cut_row_groups(file, size)
    elif file.kind == "jsonl" and not file.compression:
        count = max(1, -(-file.size // size))
        edges = [file.size * k // count for k in range(count + 1)]
        for start, end in pairwise(edges):
            yield FilePart(file, start, end, end - start)
    else:
        yield FilePart(file, 0, file.size, file.size)


def _cut_row_groups(file: InputFile, size: int) -> Iterator[FilePart]:
    """Consecutive row groups, together up to `size` bytes on disk."""
    parquet = import_extra("pyarrow.parquet")
    try:
        facts = parquet.read_metadata(file.path)
    except (OSError, ValueError) as error:
        raise DataError(str(file.path), f"is not a Parquet file: {error}", "Copy it again, or rename it.") from error
    sizes = [facts.row_group(index).total_byte_size for index in range(facts.num_row_groups)]
    weights = [file.size * part // max(1, sum(sizes)) for part in sizes]
    start, weight = 0, 0
    for index, group_weight in enumerate(weights):
        if index > start and weight + group_weight > size:
            yield FilePart(file, start, index, weight)
            start, weight = index, 0
        weight += group_weight
    yield FilePart(file, start, len(weights), weight)


def _without_sides(files: list[InputFile]) -> Iterator[InputFile]:
    """The files without index files. Raises DataError if a shard named in an index does not exist."""
    kinds = {(file.path.parent, file.kind) for file in files}
    for file in files:
        below = any(kind == SIDES.get(file.path.name) and folder.is_relative_to(file.path.parent) for folder, kind in kinds)
        if not below:
            yield file
        elif file.path.name == "index.json":
            _expect_shards(file.path)


def _expect_shards(index: Path) -> None:
    """Raises DataError unless every shard that MosaicML's index names exists, in one of its forms."""
    try:
        shards = json.loads(index.read_bytes())["shards"]
        forms = [[shard[form]["basename"] for form in ("raw_data", "zip_data") if shard.get(form)] for shard in shards]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(str(index), f"is no index of MDS shards ({error!r})", "Copy it again.") from error
    for names in forms:
        if not any((index.parent / name).is_file() for name in names):
            raise DataError(str(index), f"names {' or '.join(names)}, which is not there", "Copy the folder again.")


def _walk(folder: Path, glob: str, exclude: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    def refuse(error: OSError) -> None:
        raise DataError(str(error.filename), f"cannot be listed: {error.strerror}", "Check its permissions.") from error

    paths, seen = [], set[str]()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (place := os.path.realpath(parent)) in seen:  # by a link
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if not is_left_out(name, glob, exclude))
        paths += [Path(parent, name) for name in names if fnmatch(name, glob) and not is_left_out(name, glob, exclude)]
    yield from sorted(((path, path.relative_to(folder).as_posix()) for path in paths), key=lambda item: os.fsencode(item[1]))


def is_left_out(name: str, glob: str, exclude: tuple[str, ...]) -> bool:
    """True if a file or folder of this name is excluded, or hidden (a name that begins with a dot, if `glob` does not)."""
    return (name.startswith(".") and not glob.startswith(".")) or any(fnmatch(name, pattern) for pattern in exclude)


def kind_of(path: Path) -> tuple[Kind, Compression]:
    """Kind and compression of a file, by its name."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1], "") if suffixes else ""
    inner = suffixes[-1:] if not compression or suffixes[-1] == ".tgz" else suffixes[-2:-1]
    return KINDS.get(inner[0], "text") if inner else "text", compression


def _describe(path: Path, name: str) -> tuple[InputFile, tuple[int, int]]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode) or os.path.dirname(path) in DESCRIPTORS or str(path) == "/dev/stdin":
            rule = "is a device or a stream, and a name tells the format of a file"
            raise DataCommandError(str(path), rule, "Write it to a file first, such as text.jsonl.")
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
    except OSError as error:
        kind = DataCommandError if isinstance(error, (FileNotFoundError, NotADirectoryError)) else DataError
        remedy = "Check the path and its permissions, or leave it out of its folder: --exclude NAME."
        raise kind(str(path), f"cannot be read: {error.strerror}", remedy) from error
    kind, compression = kind_of(path)
    if ".mds" in map(str.lower, path.suffixes) and kind != "mds":
        raise DataError(str(path), "is a MDS shard in a compression that is not read here", "Use zstd, gz or none.")
    if kind in ("parquet", "arrow") and compression:
        format_name = "a compressed Parquet file" if kind == "parquet" else "a compressed Arrow file"
        raise DataError(str(path), f"is {format_name}, which cannot be read in parts", "Decompress it first.")
    if compression == "zst":
        import_extra("zstandard")
    described = InputFile(Path(os.path.abspath(path)), name, kind, compression, facts.st_size, facts.st_mtime_ns)
    return described, (facts.st_dev, facts.st_ino)
