"""`manifest.json`: the content of a prepared folder and its inputs. A folder with a manifest is complete."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.config.rules.early import MAKE_ONE, UNPREPARED, holds_prepared
from ultrascale.data.files import DataCommandError, DataError, read_json, write_json

NAME = "manifest.json"
FORMAT = "ultrascale-data-1"
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True)
class ShardRecord:
    """One finished shard."""

    name: str
    """Prefix of its `.bin` and `.idx` in the folder."""
    documents: int
    tokens: int
    bin_sha256: str
    idx_sha256: str
    sample_sha256: str = ""
    """Digest of some blocks of both files (`data.preparing.verify`); empty if an older release prepared it."""
    sources: tuple[Mapping[str, Any], ...] = ()
    """Its input files, with the range of bytes (row groups for Parquet), size and modification time."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of skipped documents by reason."""
    skipped_first: Mapping[str, str] = field(default_factory=dict)
    """First location of a skipped document, by reason."""
    inexact_cuts: int = 0
    """Number of window borders in very long documents at which ids may differ from those of the document tokenized whole."""


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer that gives ids their meaning."""

    fingerprint: str
    """sha256 of `tokenizer.json`."""
    vocab_size: int
    """The largest id, plus one."""
    eod_token: str
    eod_id: int


@dataclass(frozen=True)
class CorpusManifest:
    """A prepared folder."""

    dtype: str
    tokenizer: TokenizerFacts
    shards: tuple[ShardRecord, ...]
    request: Mapping[str, Any]
    """The request that prepared the folder; the same command may be repeated, another one is refused."""

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped documents by reason."""
        return dict(sorted(sum((Counter(shard.skipped) for shard in self.shards), Counter[str]()).items()))

    @property
    def content(self) -> str:
        """Checksum over all ids and document boundaries, in order."""
        return hashlib.sha256("".join(s.bin_sha256 + s.idx_sha256 for s in self.shards).encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """The main facts for display, JSON-able."""
        return {
            "documents": self.documents, "tokens": self.tokens, "dtype": self.dtype, "num_shards": len(self.shards),
            "skipped": self.skipped, "inexact_cuts": sum(s.inexact_cuts for s in self.shards), "content": self.content,
            "tokenizer": asdict(self.tokenizer),
        }  # fmt: skip


def save_manifest(manifest: CorpusManifest, folder: Path) -> None:
    """Writes `manifest.json` atomically."""
    shards = [asdict(shard) for shard in manifest.shards]
    write_json(folder / NAME, {"format": FORMAT, **manifest.summary(), "request": dict(manifest.request), "shards": shards})


def load_manifest(folder: Path) -> CorpusManifest:
    """Reads `manifest.json`. Raises DataError if it is missing, damaged, or of another format."""
    path = folder / NAME
    if not path.exists():
        if not holds_prepared(folder):
            raise DataCommandError(str(folder), UNPREPARED, MAKE_ONE)
        remedy = "Run `ultrascale data prepare` (again: it goes on where it stopped)."
        raise DataError(str(folder), f"holds no {NAME}, so it was not prepared to the end", remedy)
    value = read_json(path)
    if value.get("format") != FORMAT:
        raise DataError(str(path), f"has format {value.get('format')!r}, expected {FORMAT!r}", "Prepare the data again.")
    try:
        shards = tuple(record_from(shard) for shard in _is(value["shards"], list))
        facts = _typed(TokenizerFacts(**value["tokenizer"]), fingerprint=str, vocab_size=int, eod_token=str, eod_id=int)
        if value["dtype"] not in DTYPES:
            raise TypeError(f"{value['dtype']!r:.80} is none of {', '.join(DTYPES)}")
        return CorpusManifest(value["dtype"], facts, shards, _is(value["request"], dict))
    except (KeyError, TypeError) as error:
        raise DataError(str(path), f"is damaged: {error}", "Prepare the data again, into a new folder.") from error


def record_from(value: Mapping[str, Any]) -> ShardRecord:
    """A record from its JSON. Raises TypeError or KeyError if a field is missing, unknown or invalid: a shard's name must not
    be a path, and counts must not be negative."""
    record = ShardRecord(**{**value, "sources": tuple(_is(value["sources"], list))})
    if not _SHARD_NAME.fullmatch(_is(record.name, str)):
        raise TypeError(f"{record.name!r:.80} is no name of a shard")
    kinds = {"documents": int, "tokens": int, "skipped": dict, "inexact_cuts": int}
    return _typed(record, **kinds, bin_sha256=str, idx_sha256=str, sample_sha256=str)


def _typed(item: Any, **kinds: type) -> Any:
    for name, kind in kinds.items():
        _is(getattr(item, name), kind)
    return item


def _is(value: Any, kind: type) -> Any:
    """`value`, if it is of type `kind`; integers must be from 0 to 2^62. Raises TypeError."""
    if type(value) is not kind or (kind is int and not 0 <= value < 2**62):
        raise TypeError(f"{value!r:.80} is no {'count' if kind is int else kind.__name__}")
    return value
