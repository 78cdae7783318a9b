"""The manifest: which bytes of which file make up each tensor, in JSON, written last.

    {"checksum":"crc32:9ae0daaf", "format":"ultrascale-checkpoint","version":1,"save_id":"6f...","step":120, "shards":{
    "rank-00000.safetensors":{"bytes":4096,"checksum":"crc32:0c7e1f00"}}, "tensors":{
    "norm.weight":{"dtype":"F32","shape":[6],"chunks":[{"offsets":[0],"sizes":[6],"file":"rank-00000.safetensors","begin":256}]}},
    "metadata":{...}}

The first line holds the checksum of all bytes after it. `begin` is where a chunk's row-major bytes start in its file. A
manifest is validated in full: every field has its type, every box lies inside its tensor, every byte range inside its file,
none overlap, and the boxes of a tensor cover it exactly once. So memory for a tensor is bounded by bytes that are on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

from ultrascale.checkpoint.disk.checksum import checksum_text, crc32
from ultrascale.checkpoint.errors import CheckpointError, UnknownVersionError

FORMAT, VERSION = "ultrascale-checkpoint", 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element by the dtype's safetensors name. `disk.dtypes` has torch's dtypes; a list of checkpoints needs no
torch."""
MAX_DIMS = 64
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}")
_CHECKSUM = re.compile(r"crc32:[0-9a-f]{8}")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
HEAD = re.compile(rb'\{"checksum":"crc32:[0-9a-f]{8}",\n"format":"%s","version":%d,' % (FORMAT.encode(), VERSION))
"""First bytes of a manifest of this format, even if it is damaged further on."""
FIRST_LINE = re.compile(rb'\{"checksum":"(crc32:[0-9a-f]{8})",')


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, stored in row-major order from byte `begin` of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: dtype by its name in `ITEM_BYTES`, global shape, and the boxes that cover it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Shard:
    """A file with tensor data: its length, and the checksum of the whole file."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint except the tensor data."""

    save_id: str
    """Unique to every save and repeated in every shard, so that shards of two saves cannot be mixed."""
    step: int
    shards: dict[str, Shard]
    tensors: dict[str, TensorEntry]
    metadata: dict[str, Any]


def shard_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def manifest_of(save_id: str, step: int, parts: list[dict[str, Any]], metadata: dict[str, Any]) -> Manifest:
    """The manifest of the shards that ranks have written; `parts` gives each one's file, bytes, checksum and boxes."""
    shards = {part["file"]: Shard(part["bytes"], part["checksum"]) for part in parts}
    chunks: dict[str, list[Chunk]] = {}
    heads: dict[str, tuple[str, tuple[int, ...]]] = {}
    for part in parts:
        for name, dtype, shape, offsets, sizes, begin in part["boxes"]:
            heads[name] = (dtype, tuple(shape))
            chunks.setdefault(name, []).append(Chunk(tuple(offsets), tuple(sizes), part["file"], begin))
    entries = {name: TensorEntry(*head, tuple(sorted(chunks[name], key=lambda c: c.offsets))) for name, head in heads.items()}
    return Manifest(save_id, step, shards, dict(sorted(entries.items())), metadata)


def encode(manifest: Manifest) -> bytes:
    """The file's bytes. Raises CheckpointError if `metadata` would change on the way through JSON."""
    shards = {name: {"bytes": shard.bytes, "checksum": shard.checksum} for name, shard in manifest.shards.items()}
    tensors = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "chunks": [vars(chunk) for chunk in entry.chunks]}
        for name, entry in manifest.tensors.items()
    }
    head = f'"format":"{FORMAT}","version":{VERSION},"save_id":"{manifest.save_id}","step":{manifest.step},\n'
    body = f'{head}"shards":{_lines(shards)},\n"tensors":{_lines(tensors)},\n"metadata":{metadata_text(manifest.metadata)}}}\n'
    return with_checksum(body.encode("ascii"))


def with_checksum(data: bytes) -> bytes:
    """`data`, the rest of a JSON object, after a first line with its checksum."""
    return f'{{"checksum":"{checksum_text(crc32(data))}",\n'.encode("ascii") + data


def metadata_text(metadata: dict[str, Any]) -> str:
    """`metadata` as JSON. Raises CheckpointError unless it survives the round trip: no NaN, no tuples, only string keys."""
    try:
        if not isinstance(metadata, dict):
            raise TypeError(f"is {type(metadata).__name__}")
        text = _dump(metadata)
        same = json.loads(text) == metadata
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"metadata: {error}. Give a dictionary of plain finite JSON values.") from error
    if not same:
        changed = [key for key, value in json.loads(text).items() if key not in metadata or metadata[key] != value]
        raise CheckpointError(
            f"metadata: {changed} would change on the way through JSON. Use lists for tuples, strings as keys."
        )
    return text


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, validated in full; `where` names the file in errors. Raises CheckpointError; UnknownVersionError
    for another format, whatever else differs in it."""
    first, _, rest = data.partition(b"\n")
    line = FIRST_LINE.fullmatch(first)
    if line is None:
        with suppress(ValueError, RecursionError):
            expect_known_format(json.loads(data), where)
        raise CheckpointError(
            f"{where}: does not start with a checksum; it is damaged or not a manifest. Use another checkpoint."
        )
    if checksum_text(crc32(rest)) != line[1].decode():
        actual = checksum_text(crc32(rest))
        raise CheckpointError(
            f"{where}: checksum is {actual}, expected {line[1].decode()}: it is damaged. Use another checkpoint."
        )
    try:
        content = json.loads(b"{" + rest, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON that we wrote ({error}). Use another checkpoint.") from error
    expect_known_format(content, where)
    return _Check(where).manifest(content)


def expect_known_format(content: Any, where: str, known: str = FORMAT, number: int = VERSION) -> None:
    """Raises UnknownVersionError if `content` declares a format other than ours. Content that declares none passes."""
    kind, version = (content.get("format"), content.get("version")) if isinstance(content, dict) else (None, None)
    if isinstance(kind, str) and (kind != known or type(version) is not int or version != number):
        problem = (
            f"format is {kind!r:.80} version {version!r:.20}, expected {known!r} version {number}, which this release reads"
        )
        remedy = "Go on with that release, or move the checkpoint away to go on from an older one"
        raise UnknownVersionError(f"{where}: {problem}: {UnknownVersionError.WORDS}. {remedy}.")


class _Check:
    """Turns parsed JSON into a `Manifest`, and rejects any invalid field."""

    def __init__(self, where: str):
        self.where = where

    def refuse(self, what: str, value: object, expected: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) < 200 else shown[:200] + "..."
        raise CheckpointError(f"{self.where}: {what} is {shown}, expected {expected}. Use another checkpoint.")

    def fields(self, value: Any, what: str, *keys: str) -> list[Any]:
        if not isinstance(value, dict) or set(value) != set(keys):
            self.refuse(what, sorted(value) if isinstance(value, dict) else value, f"an object with keys {sorted(keys)}")
        return [value[key] for key in keys]

    def integer(self, value: Any, what: str, low: int = 0) -> int:
        if type(value) is not int or not low <= value < 2**63:
            self.refuse(what, value, f"an integer from {low} to {2**63 - 1}")
        return value

    def text(self, value: Any, what: str, pattern: re.Pattern[str]) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            self.refuse(what, value, f"text like {pattern.pattern}")
        return value

    def integers(self, value: Any, what: str, count: int | None = None) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > MAX_DIMS or count not in (None, len(value)):
            self.refuse(what, value, f"a list of {f'at most {MAX_DIMS}' if count is None else count} integers")
        return tuple(self.integer(number, what) for number in value)

    def manifest(self, content: Any) -> Manifest:
        keys = ("format", "version", "save_id", "step", "shards", "tensors", "metadata")
        kind, version, save_id, step, shards, tensors, metadata = self.fields(content, "manifest", *keys)
        if kind != FORMAT or version != VERSION:
            self.refuse("format", f"{kind!r} version {version!r}", f"{FORMAT!r} version {VERSION}")
        for what, value in (("shards", shards), ("tensors", tensors), ("metadata", metadata)):
            if not isinstance(value, dict):
                self.refuse(what, value, "an object")
        files = {self.text(name, "shard name", _FILE): self.shard(shard, name) for name, shard in shards.items()}
        entries = {check_name(name, self.where): self.entry(entry, name, files) for name, entry in tensors.items()}
        self.separate(files, entries)
        return Manifest(self.text(save_id, "save_id", _SAVE_ID), self.integer(step, "step"), files, entries, metadata)

    def shard(self, value: Any, name: str) -> Shard:
        size, checksum = self.fields(value, f"shard {name}", "bytes", "checksum")
        return Shard(self.integer(size, f"bytes of {name}"), self.text(checksum, f"checksum of {name}", _CHECKSUM))

    def entry(self, value: Any, name: str, files: dict[str, Shard]) -> TensorEntry:
        dtype, shape, chunks = self.fields(value, f"tensor {name!r}", "dtype", "shape", "chunks")
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self.refuse(f"dtype of {name!r}", dtype, f"one of {sorted(ITEM_BYTES)}")
        shape = self.integers(shape, f"shape of {name!r}")
        if not isinstance(chunks, list):
            self.refuse(f"chunks of {name!r}", chunks, "a list")
        entry = TensorEntry(dtype, shape, tuple(self.chunk(chunk, name, shape, dtype, files) for chunk in chunks))
        covered = sum(prod(chunk.sizes) for chunk in entry.chunks)
        if covered != prod(shape):
            self.refuse(f"number of stored elements of {name!r}", covered, f"{prod(shape)} for shape {list(shape)}")
        clash = overlapping_boxes([(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if clash:
            self.refuse(f"tensor {name!r}", f"stored twice in {clash}", "every element stored once")
        return entry

    def chunk(self, value: Any, name: str, shape: tuple[int, ...], dtype: str, files: dict[str, Shard]) -> Chunk:
        what = f"chunk of {name!r}"
        offsets, sizes, file, begin = self.fields(value, what, "offsets", "sizes", "file", "begin")
        offsets = self.integers(offsets, f"offsets of a {what}", len(shape))
        sizes = self.integers(sizes, f"sizes of a {what}", len(shape))
        if any(offset + size > extent for offset, size, extent in zip(offsets, sizes, shape, strict=True)):
            self.refuse(what, f"offsets {offsets} sizes {sizes}", f"a box inside shape {list(shape)}")
        if not isinstance(file, str) or file not in files:
            self.refuse(f"file of a {what}", file, f"one of the {len(files)} shards listed")
        end = self.integer(begin, f"begin of a {what}", low=8) + prod(sizes) * ITEM_BYTES[dtype]
        if end > files[file].bytes:
            self.refuse(what, f"bytes {begin} to {end} of {file}", f"a range inside its {files[file].bytes} bytes")
        return Chunk(offsets, sizes, file, begin)

    def separate(self, files: dict[str, Shard], entries: dict[str, TensorEntry]) -> None:
        """Checks that no byte of a file belongs to two chunks."""
        ranges: dict[str, list[tuple[int, int, str]]] = {file: [] for file in files}
        for name, entry in entries.items():
            for chunk in entry.chunks:
                ranges[chunk.file].append((chunk.begin, chunk.begin + prod(chunk.sizes) * entry.itemsize, name))
        for file, taken in ranges.items():
            taken.sort()
            for (_, end, name), (begin, _, other) in pairwise(taken):
                if begin < end:
                    self.refuse(f"{file} at byte {begin}", f"shared by {name!r} and {other!r}", "a byte range for each")


def check_name(name: str, where: str) -> str:
    """`name` if it is a valid tensor name. Raises CheckpointError."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= 1000 or name == "__metadata__":
        raise CheckpointError(f"{where}: {name!r:.200} cannot name a tensor; expected 1 to 1000 printable characters.")
    return name


def overlapping_boxes(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> str | None:
    """Description of two boxes (offsets, sizes) of equal rank that share an element; None if there are none.

    A sweep along the dimension with most distinct offsets: near linear for boxes cut along one dimension.
    """
    solid = [box for box in boxes if 0 not in box[1]]
    if len(solid) < 2:
        return None
    dim = max(range(len(solid[0][0])), key=lambda d: len({offsets[d] for offsets, _ in solid}), default=None)
    if dim is None:
        return f"{solid[0]} and {solid[1]}"
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in sorted(solid, key=lambda box: box[0][dim]):
        active = [box for box in active if box[0][dim] + box[1][dim] > offsets[dim]]
        for other_offsets, other_sizes in active:
            sides = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in sides):
                return f"{(offsets, sizes)} and {(other_offsets, other_sizes)}"
        active.append((offsets, sizes))
    return None


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _lines(items: dict[str, Any]) -> str:
    """A JSON object with one key a line, so that manifests can be read, searched and compared."""
    return "{\n" + ",\n".join(f"{_dump(key)}:{_dump(value)}" for key, value in items.items()) + "}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return mapping


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
