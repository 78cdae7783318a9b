"""A source of tokens: the shards of a prepared folder, or one foreign prefix, as one stream of documents in stored order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ultrascale.data.errors import DataError
from ultrascale.data.indexed import Header, Shard, prefix_paths, read_header
from ultrascale.data.manifest import Manifest, TokenizerFacts, load_manifest
from ultrascale.data.preparing.verify import sample_of
from ultrascale.data.streamed import StoredPath, StreamedFolder, StreamedTokens
from ultrascale.storage import url_of

OPEN_SHARDS = 128  # each holds two file descriptors, and 1,024 is a usual limit
FOREIGN_BLOCKS = 256
_ENDS = 1 << 20


class Corpus:
    """The stream of one source.

    `path` is a folder made by `ultrascale data prepare`, also in a store (`s3://...`), or a Megatron prefix (`x` for `x.bin`
    and `x.idx`).
    Raises DataError, naming the file, if it is neither, is not complete, or a shard is missing or has another size.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.manifest: Manifest | None = None
        self.streamed: StreamedFolder | None = None
        url = url_of(path)
        if url is not None:
            self.path, self.streamed = StoredPath(url), StreamedFolder(url)
            self.manifest = self.streamed.manifest
            self.prefixes = [self.path / shard.name for shard in self.manifest.shards]
            counts = [shard.tokens for shard in self.manifest.shards]
        elif self.path.is_dir():
            self.manifest = load_manifest(self.path)
            self.prefixes = [self.path / shard.name for shard in self.manifest.shards]
            counts = [shard.tokens for shard in self.manifest.shards]
            for prefix, count in zip(self.prefixes, counts, strict=True):
                _expect_size(prefix, count * np.dtype(self.manifest.dtype).itemsize)
        else:
            self.prefixes, counts = [_foreign_prefix(self.path)], []
        # Not a method, which would tie the cache to the corpus in a circle and keep files open until the next collection.
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
        """Bytes of all `.bin` and `.idx`."""
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
        """`tokenizer.json` beside the shards, if there."""
        here = self.path if self.streamed is None else self.streamed.folder
        path = (here if self.manifest else self.path.parent) / "tokenizer.json"
        return path if path.is_file() else None

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The shards that hold tokens start..start+count-1 of the stream, as (shard, first, last) in the shard's own tokens."""
        index = int(np.searchsorted(self.offsets, start, "right")) - 1
        while count > 0:
            first = start - int(self.offsets[index])
            last = min(first + count, int(self.offsets[index + 1] - self.offsets[index]))
            if last > first:
                yield index, first, last
            count, start, index = count - (last - first), start + (last - first), index + 1

    def read_into(self, tokens: npt.NDArray[Any], starts: npt.NDArray[np.bool_], start: int) -> None:
        """Copies tokens from `start` of the stream into `tokens` [n], and marks in `starts` [n] those that begin a document."""
        at = 0
        for index, first, last in self.pieces(start, len(tokens)):
            shard = self.shard(index)
            shard.expect_whole()
            tokens[at : at + last - first] = shard.tokens[first:last]
            starts[shard.document_starts(first, last) + (at - first)] = True
            at += last - first

    def expect(self, start: int, count: int) -> None:
        """Begin to fetch tokens start..start+count-1, if they are in a store."""
        for index, first, last in self.pieces(start, count) if self.streamed is not None else ():
            tokens = self.shard(index).tokens
            if isinstance(tokens, StreamedTokens):
                tokens.expect(first, last)

    def document(self, number: int) -> npt.NDArray[Any]:
        """The ids of one document, counted over all shards. Raises IndexError if there is no such document."""
        first = 0
        for index in range(len(self.prefixes)):
            here = self.manifest.shards[index].documents if self.manifest else self.num_documents
            if 0 <= number - first < here:
                return self.shard(index).document(number - first)
            first += here
        raise IndexError(f"{self.path} has documents 0 to {first - 1}, not {number}")

    def fingerprint(self) -> str:
        """Fingerprint of the recorded ids and document boundaries, independent of where the files are. `data.preparing.verify`
        checks it against the content.

        A prepared folder has checksums of all it holds. Of a foreign prefix the sizes, the first and last MiB and, after a plus
        sign, which older releases did not write, 256 blocks of 4 KiB of both files are taken, as they were when it was opened.
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


def _open_shard(prefixes: tuple[Path, ...], promised: tuple[int, ...], index: int) -> Shard:
    shard = Shard(prefixes[index])
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
        raise DataError(str(path), problem, "Make it with `ultrascale data prepare ... --output FOLDER`.")
    read_header(idx_path)
    return path
