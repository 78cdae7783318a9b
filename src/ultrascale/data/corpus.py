"""A source of tokens: the shards of a prepared folder, or one foreign prefix, as one stream of documents in stored order.

For a prepared folder in a store, indexes are downloaded, and token ids are fetched in blocks on demand or ahead of time:

    index     of a shard that is opened: whole, compared with its checksum, in a temporary folder of the process
    ids       blocks of 64 KiB in memory, 256 MiB of them at most, least recently used evicted first
    ahead     the sequences of the next step are known, since their order is a function of the step: they are requested, all at
              once, while the current step is computed

Its order and bits are those of the same folder on a disk: only the source of the bytes differs.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.data.files import DataCommandError, DataError, reading
from ultrascale.data.indexed import Header, IndexedShard, prefix_paths, read_header
from ultrascale.data.manifest import NAME, CorpusManifest, ShardRecord, TokenizerFacts, load_manifest
from ultrascale.data.preparing.verify import BLOCK_BYTES as SAMPLE_BYTES
from ultrascale.data.preparing.verify import NOT_AS_PREPARED, digest_of_blocks, sample_of
from ultrascale.storage import MissingError, Store, open_store, url_of

OPEN_SHARDS = 128  # each holds two file descriptors, and 1,024 is a usual limit
FOREIGN_BLOCKS = 256
_ENDS = 1 << 20


class Corpus:
    """The stream of one source.

    `path` is a folder made by `ultrascale data prepare`, also in a store (`s3://...`), or a Megatron prefix (`x` for `x.bin`
    and `x.idx`). Raises DataError, naming the file, if it is neither, is incomplete, or a shard is missing or has another size.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.manifest: CorpusManifest | None = None
        self.streamed: StreamedFolder | None = None
        if (url := url_of(path)) is not None:
            self.path, self.streamed = StoredPath(url), StreamedFolder(url)
            self.manifest = self.streamed.manifest
        elif self.path.is_dir():
            self.manifest = load_manifest(self.path)
        if self.manifest is None:
            self.prefixes, counts = [_foreign_prefix(self.path)], []
        else:
            self.prefixes = [self.path / shard.name for shard in self.manifest.shards]
            counts = [shard.tokens for shard in self.manifest.shards]
        if self.manifest is not None and self.streamed is None:
            for prefix, count in zip(self.prefixes, counts, strict=True):
                _expect_size(prefix, count * np.dtype(self.manifest.dtype).itemsize)
        # Not a method: that would create a reference cycle with the cache and keep files open until the next collection.
        opened = partial(_open_shard, tuple(self.prefixes), tuple(counts)) if self.streamed is None else self.streamed.shard
        self.shard = lru_cache(maxsize=OPEN_SHARDS)(opened)
        if self.manifest is None:
            self.shard(0).verify_index()
            counts = [self.shard(0).num_tokens]
            self._foreign_fingerprint = f"{self._ends()}+{sample_of(self.prefixes[0], FOREIGN_BLOCKS)}"
        self.offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))  # [shards + 1]

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """Total bytes of all `.bin` and `.idx` files."""
        headers = [self.shard(0).header] if self.manifest is None else [
            Header(self.manifest.dtype, shard.documents, shard.documents + 1) for shard in self.manifest.shards
        ]  # fmt: skip
        return sum(header.index_bytes for header in headers) + self.num_tokens * np.dtype(headers[0].dtype).itemsize

    @property
    def num_documents(self) -> int:
        return self.manifest.documents if self.manifest else self.shard(0).num_documents

    @property
    def tokenizer(self) -> TokenizerFacts | None:
        """Facts of the tokenizer; None for a foreign prefix, which does not record them."""
        return self.manifest.tokenizer if self.manifest else None

    @property
    def tokenizer_path(self) -> Path | None:
        """`tokenizer.json` beside the shards, if it exists."""
        folder = self.path if self.streamed is None else self.streamed.folder
        path = (folder if self.manifest else self.path.parent) / "tokenizer.json"
        return path if path.is_file() else None

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The shards that hold tokens start..start+count-1 of the stream, as (shard, first, last) in token offsets of the
        shard."""
        index = int(np.searchsorted(self.offsets, start, "right")) - 1
        while count > 0:
            first = start - int(self.offsets[index])
            last = min(first + count, int(self.offsets[index + 1] - self.offsets[index]))
            if last > first:
                yield index, first, last
            count, start, index = count - (last - first), start + (last - first), index + 1

    def read_into(self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.bool_], start: int) -> None:
        """Copies tokens from `start` of the stream into `tokens` [n], and marks in `starts` [n] the first token of each
        document."""
        position = 0
        for index, first, last in self.pieces(start, len(tokens)):
            shard = self.shard(index)
            shard.expect_whole()
            tokens[position : position + last - first] = shard.tokens[first:last]
            starts[shard.document_starts(first, last) + (position - first)] = True
            position += last - first

    def expect(self, start: int, count: int) -> None:
        """Start fetching tokens start..start+count-1, if they are in a store."""
        for index, first, last in self.pieces(start, count) if self.streamed is not None else ():
            tokens = self.shard(index).tokens
            if isinstance(tokens, StreamedTokens):
                tokens.expect(first, last)

    def document(self, number: int) -> npt.NDArray[Any]:
        """The ids of one document, counted over all shards. Raises IndexError if there is no such document."""
        first = 0
        for index in range(len(self.prefixes)):
            in_shard = self.manifest.shards[index].documents if self.manifest else self.num_documents
            if 0 <= number - first < in_shard:
                return self.shard(index).document(number - first)
            first += in_shard
        raise IndexError(f"{self.path} has documents 0 to {first - 1}, not {number}")

    def fingerprint(self) -> str:
        """Fingerprint of the recorded ids and document boundaries, independent of the location of the files.
        `data.preparing.verify` compares it with the content.

        For a prepared folder it covers the checksums of all its content. For a foreign prefix it covers sizes, the first and
        last MiB and, after a plus sign, which older releases did not write, 256 blocks of 4 KiB of both files, as they were
        when opened.
        """
        return self.manifest.content if self.manifest else self._foreign_fingerprint

    def _ends(self) -> str:
        digest = hashlib.sha256()
        for path in prefix_paths(self.prefixes[0]):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with open(path, "rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read(_ENDS))
        return digest.hexdigest()


def _open_shard(prefixes: tuple[Path, ...], promised: tuple[int, ...], index: int) -> IndexedShard:
    shard = IndexedShard(prefixes[index])
    if promised and shard.num_tokens != promised[index]:
        problem = f"holds {shard.num_tokens} tokens, the manifest promises {promised[index]}"
        raise DataError(str(shard.bin_path), problem, "Run the same `data prepare` again: it makes damaged shards anew.")
    return shard


def _expect_size(prefix: Path, size: int) -> None:
    bin_path, idx_path = prefix_paths(prefix)
    remedy = "Run the same `ultrascale data prepare` again: it makes missing and damaged shards anew."
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise DataError(str(path), "is missing, but the manifest lists it", remedy)
    if bin_path.stat().st_size != size:
        raise DataError(str(bin_path), f"is {bin_path.stat().st_size} bytes, the manifest promises {size}", remedy)


def _foreign_prefix(path: Path) -> Path:
    for suffix in (".bin", ".idx"):
        if path.name.endswith(suffix):
            path = path.with_name(path.name.removesuffix(suffix))
    bin_path, idx_path = prefix_paths(path)
    if not bin_path.exists() and not idx_path.exists():
        problem = f"is neither a prepared folder nor a prefix: there is no {bin_path.name} beside it"
        raise DataCommandError(str(path), problem, "Make it with `ultrascale data prepare ... --output FOLDER`.")
    read_header(idx_path)
    return path


BLOCK_BYTES = 64 << 10
CACHE_BYTES = 256 << 20
STREAMS = 16
TOKENIZER = "tokenizer.json"
_AGAIN = "Check the store, and go on from the newest checkpoint."
_COPY = "Copy it there again from where it was prepared."


class StoredPath(PosixPath):
    """A URL where a path is expected, for messages and names. It does not exist as a file on this machine."""

    def __str__(self) -> str:
        return url_of(super().__str__()) or super().__str__()


class BlockCache:
    """LRU cache of blocks of objects, fetched by several threads."""

    def __init__(self, most_bytes: int = CACHE_BYTES):
        self.most_blocks = max(1, most_bytes // BLOCK_BYTES)
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(STREAMS, "data")

    def expect(self, store: Store, key: str, begin: int, end: int) -> list[Future[bytes]]:
        """Start fetching the blocks with bytes `begin` to `end` - 1 of an object, unless they are cached."""
        blocks = []
        with self._lock:
            for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                name = (store.where(key), block)
                future = self._blocks.get(name)
                if future is None or (future.done() and future.exception() is not None):
                    start = block * BLOCK_BYTES
                    self._blocks[name] = future = self._pool.submit(store.read_range, key, start, start + BLOCK_BYTES)
                self._blocks.move_to_end(name)
                blocks.append(future)
            while len(self._blocks) > self.most_blocks:
                self._blocks.popitem(last=False)
        return blocks

    def read(self, store: Store, key: str, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` - 1. Raises DataError if they cannot be fetched."""
        with reading(store.where(key), _AGAIN):
            blocks = [block.result() for block in self.expect(store, key, begin, end)]
        data = b"".join(blocks)
        first = begin - begin // BLOCK_BYTES * BLOCK_BYTES
        if len(data) < first + end - begin or any(len(block) < BLOCK_BYTES for block in blocks[:-1]):
            raise DataError(store.where(key), f"ends before byte {end}, and was longer when it was opened", _COPY)
        return data[first : first + end - begin]


class StreamedTokens:
    """The ids of one `.bin` in a store, with an array's length and slices."""

    def __init__(self, store: Store, key: str, dtype: npt.DTypeLike, size: int, cache: BlockCache):
        self.store, self.key, self.cache = store, key, cache
        self.dtype = np.dtype(dtype)
        self._length = size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        first, last, _ = span.indices(self._length)
        return np.frombuffer(self.cache.read(self.store, self.key, *self._bytes(first, last)), self.dtype)

    def expect(self, first: int, last: int) -> None:
        """Start fetching ids first..last-1."""
        self.cache.expect(self.store, self.key, *self._bytes(first, last))

    def _bytes(self, first: int, last: int) -> tuple[int, int]:
        return first * self.dtype.itemsize, last * self.dtype.itemsize


class StreamedShard(IndexedShard):
    """A shard whose index is a local file and whose ids are in a store. Raises DataError as `IndexedShard` does, and if a
    sample of the ids, or the index, differs from the manifest."""

    def __init__(self, store: Store, record: ShardRecord, folder: Path, cache: BlockCache):
        self._store, self._key, self._record = store, f"{record.name}.bin", record
        self._ask(lambda: _fetch_file(store, f"{record.name}.idx", folder))
        index = folder / f"{record.name}.idx"
        content = index.read_bytes()
        if hashlib.sha256(content).hexdigest() != record.idx_sha256:
            raise DataError(store.where(index.name), "has another checksum than the manifest says", _COPY)
        super().__init__(folder / record.name)
        size = self._bin_size()
        self.bin_path, self.idx_path = (StoredPath(store.where(f"{record.name}{end}")) for end in (".bin", ".idx"))
        blocks = [
            (size, lambda at: store.read_range(self._key, at, min(at + SAMPLE_BYTES, size)) if size else b""),
            (len(content), lambda at: content[at : at + SAMPLE_BYTES]),
        ]
        self.tokens = StreamedTokens(store, self._key, self.dtype, size, cache)  # pyright: ignore[reportAttributeAccessIssue]
        if record.sample_sha256 and self._ask(lambda: digest_of_blocks(blocks)) != record.sample_sha256:
            raise DataError(store.where(record.name), NOT_AS_PREPARED, _COPY)

    def expect_whole(self) -> None:
        """No check: no file is mapped that could be truncated."""

    def _bin_size(self) -> int:
        size = self._ask(lambda: self._store.size(self._key))
        promised = self._record.tokens * self.dtype.itemsize
        if size != promised:
            raise DataError(self._store.where(self._key), f"is {size} bytes, the manifest promises {promised}", _COPY)
        return size

    def _map_ids(self, size: int) -> bytes:
        return b""

    def _ask(self, work: Any) -> Any:
        with reading(self._store.where(self._key), _AGAIN):
            try:
                return work()
            except MissingError as error:
                missing = str(error).removesuffix(" is not there.")
                raise DataError(missing, "is missing, but the manifest lists it", _COPY) from error


class StreamedFolder:
    """A folder made by `ultrascale data prepare`, in a store. Raises DataError if it is not one, or the store does not
    respond."""

    def __init__(self, url: str):
        self._scratch = tempfile.TemporaryDirectory(prefix="ultrascale-data-")
        self.folder = Path(self._scratch.name)
        self.cache = BlockCache()
        with reading(url):
            self.store = open_store(url)
            names = {stored.key for stored in self.store.names("")[0]}
            for name in (NAME, TOKENIZER):
                if name in names:
                    _fetch_file(self.store, name, self.folder)
        if NAME not in names:
            remedy = "Copy the whole folder there that `ultrascale data prepare` has made."
            raise DataError(url, f"holds no {NAME}, so it is no prepared folder, which alone is read from a store", remedy)
        self.manifest: CorpusManifest = load_manifest(self.folder)

    def shard(self, index: int) -> StreamedShard:
        """One shard, opened."""
        return StreamedShard(self.store, self.manifest.shards[index], self.folder, self.cache)


def _fetch_file(store: Store, name: str, folder: Path) -> None:
    if not (folder / name).exists():
        (folder / name).write_bytes(store.read(name))
