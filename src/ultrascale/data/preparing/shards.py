"""One shard in one process: read its parts, tokenize, write, and return its record."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ultrascale.data.files import DataError, read_json, sha256_of, write_json
from ultrascale.data.indexed import ShardWriter, best_dtype, prefix_paths
from ultrascale.data.manifest import ShardRecord, TokenizerFacts, record_from
from ultrascale.data.preparing.verify import sample_of
from ultrascale.data.reading.documents import Document, PartReader
from ultrascale.data.reading.inputs import FilePart
from ultrascale.data.tokenizer import LONG_TEXT, LongEncoder, encode_all, load_tokenizer
from ultrascale.failpoints import failpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 1024
OnBad = Literal["fail", "skip"]
Report = Callable[[int, int], None]
"""Called with the bytes of input and the tokens done in this shard so far."""


@dataclass(frozen=True)
class ShardTask:
    """Everything that one process needs to make one shard, in the output folder and in that of held-out documents, if there is
    one."""

    name: str
    parts: tuple[FilePart, ...]
    folders: tuple[Path, ...]
    """Output folders; the second takes the validation documents."""
    tokenizer_path: Path
    tokenizer: TokenizerFacts
    field: str
    on_bad: OnBad
    validation_fraction: float
    known: tuple[ShardRecord | None, ...]
    """Records of this shard in the manifests, one for each folder."""


@dataclass
class _Tally:
    """Counts of the documents met."""

    consumed_bytes: int = 0
    tokens: int = 0
    inexact_cuts: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_first: dict[str, str] = field(default_factory=dict)


def make_shard(task: ShardTask, report: Report) -> tuple[ShardRecord, ...]:
    """Makes the shard, or keeps it if it exists and its checksums are right. Returns the record of each folder.

    Raises DataError for bad input (if `on_bad` is fail), changed input, or a disk that cannot be written.
    """
    kept_records = [_kept_record(task, place) for place in range(len(task.folders))]
    if all(kept_records):
        report(sum(part.weight_bytes for part in task.parts), sum(record.tokens for record in kept_records if record))
        return tuple(record for record in kept_records if record)
    tokenizer = _tokenizer(str(task.tokenizer_path), task.tokenizer.fingerprint)
    dtype = best_dtype(task.tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = []
        for folder in task.folders:
            writers.append(ShardWriter(folder / task.name, dtype))
            stack.callback(writers[-1].discard)
        tally = _write_documents(task, tokenizer, writers, report)
        _expect_unchanged(task.parts)
        records = tuple(_record(task, place, writer, tally) for place, writer in enumerate(writers))
    for folder, record in zip(task.folders, records, strict=True):
        # A loss of power may undo names or this record; a restart checks the sums and makes the shard again.
        write_json(record_path(folder, task.name), asdict(record), durable=False)
        failpoint("shard.recorded")
    return records


def record_path(folder: Path, name: str) -> Path:
    """Path of the record of a finished shard until the manifest is written."""
    return folder / f"{name}.json"


def is_held_out(key: str, fraction: float) -> bool:
    """True if a document is held out for validation: decided by a hash of its file and place, the same in every run and for
    every worker."""
    if fraction <= 0:
        return False
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _write_documents(task: ShardTask, tokenizer: Tokenizer, writers: list[ShardWriter], report: Report) -> _Tally:
    tally, batch, size = _Tally(), [], 0

    def write_batch() -> None:
        _write_batch(task, tokenizer, writers, batch, tally)
        batch.clear()

    for item in _items(task, tally):
        if isinstance(item, DataError):
            _skip(task, item, tally)
        elif item.text is not None and len(item.text) < LONG_TEXT:
            batch.append(item)
            size += len(item.text)
            failpoint("shard.document")
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                write_batch()
                size = 0
                report(tally.consumed_bytes, tally.tokens)
        else:
            write_batch()  # documents keep their order
            size = 0
            _write_long(task, tokenizer, writers, item, tally, report)
    write_batch()
    report(sum(part.weight_bytes for part in task.parts), tally.tokens)
    return tally


def _items(task: ShardTask, tally: _Tally) -> Iterator[Document | DataError]:
    before = 0
    for part in task.parts:
        reader = PartReader(part, field=task.field, spool=task.folders[0], line_numbers=task.on_bad == "fail")
        for item in reader:
            tally.consumed_bytes = before + reader.consumed_bytes
            yield item
        before += part.weight_bytes


def _write_batch(
    task: ShardTask, tokenizer: Tokenizer, writers: list[ShardWriter], batch: list[Document], tally: _Tally
) -> None:
    ids: list[list[int]] = [[] for _ in writers]
    lengths: list[list[int]] = [[] for _ in writers]
    texts = [document.text for document in batch if document.text is not None]
    for document, encoded in zip(batch, encode_all(tokenizer, texts), strict=True):
        if not encoded:
            _skip(task, _without_tokens(document), tally)
            continue
        place = int(is_held_out(document.key, task.validation_fraction))
        ids[place] += encoded
        ids[place].append(task.tokenizer.eod_id)
        lengths[place].append(len(encoded) + 1)
    for place, writer in enumerate(writers):
        writer.add_documents(ids[place], lengths[place])
        tally.tokens += len(ids[place])


def _write_long(
    task: ShardTask, tokenizer: Tokenizer, writers: list[ShardWriter], document: Document, tally: _Tally, report: Report
) -> None:
    writer = writers[int(is_held_out(document.key, task.validation_fraction))]
    encoder, tokens = LongEncoder(tokenizer), 0
    pieces = document.pieces if document.pieces is not None else _cut(document.text or "")
    try:
        for ids in encoder.encode(pieces):
            writer.append(ids)
            tokens += len(ids)
            report(tally.consumed_bytes, tally.tokens + tokens)
        if tokens == 0:
            raise _without_tokens(document)
    except DataError as error:
        writer.abandon_document()
        _skip(task, error, tally)
        return
    writer.append([task.tokenizer.eod_id])
    writer.end_document()
    tally.tokens += tokens + 1
    tally.inexact_cuts += encoder.inexact_cuts


def _cut(text: str) -> Iterator[str]:
    """`text` in pieces: with one piece, the encoder would copy the rest for every window."""
    return (text[first : first + LONG_TEXT] for first in range(0, len(text), LONG_TEXT))


def _skip(task: ShardTask, error: DataError, tally: _Tally) -> None:
    if task.on_bad == "fail" or not error.reason:
        raise error
    tally.skipped[error.reason] = tally.skipped.get(error.reason, 0) + 1
    tally.skipped_first.setdefault(error.reason, error.where)


def _without_tokens(document: Document) -> DataError:
    remedy = "Leave such documents out with --on-bad skip."
    return DataError(document.where, "the document is empty for this tokenizer", remedy, "empty")


def _record(task: ShardTask, place: int, writer: ShardWriter, tally: _Tally) -> ShardRecord:
    """The record of one shard. Skipped documents are counted once, in the training folder."""
    written, first = writer.finish(), place == 0
    return ShardRecord(
        name=task.name,
        documents=written.documents,
        tokens=written.tokens,
        bin_sha256=written.bin_sha256,
        idx_sha256=written.idx_sha256,
        sample_sha256=sample_of(task.folders[place] / task.name),
        sources=tuple(part.facts() for part in task.parts),
        skipped=dict(sorted(tally.skipped.items())) if first else {},
        skipped_first=dict(sorted(tally.skipped_first.items())) if first else {},
        inexact_cuts=tally.inexact_cuts if first else 0,
    )


def _kept_record(task: ShardTask, place: int) -> ShardRecord | None:
    """The record of a shard finished by an earlier run, if its files still match."""
    folder, record = task.folders[place], task.known[place]
    path = record_path(folder, task.name)
    try:
        if record is None:
            record = record_from(read_json(path))
        if record.sources != tuple(part.facts() for part in task.parts) or (record.skipped and task.on_bad == "fail"):
            return None
        bin_path, idx_path = prefix_paths(folder / record.name)
        same = sha256_of(bin_path) == record.bin_sha256 and sha256_of(idx_path) == record.idx_sha256
        record = replace(record, sample_sha256=sample_of(folder / record.name))  # an older release wrote none
    except (OSError, DataError, KeyError, TypeError):  # not there, or cut short: it is made again
        return None
    return record if same else None


def _expect_unchanged(parts: tuple[FilePart, ...]) -> None:
    for part in parts:
        now: Any = part.file.path.stat()
        if (now.st_size, now.st_mtime_ns) != (part.file.size, part.file.mtime_ns):
            raise DataError(str(part.file.path), "changed while it was read", "Prepare the data again, into a new folder.")


@lru_cache(maxsize=1)
def _tokenizer(path: str, fingerprint: str) -> Tokenizer:
    """Loaded once for each process, not for each shard; `fingerprint` is part of the key."""
    return load_tokenizer(path)
