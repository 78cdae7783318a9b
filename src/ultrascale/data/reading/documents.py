"""Documents read from files one at a time, with memory independent of the size of the file, the line or the document.

A text file is one document; so is a line of JSONL, a row of Parquet, Arrow or CSV and a sample of WebDataset or MDS. For an
invalid document the reader yields a `DataError` in its place, and continues; the caller decides whether that ends the run or is
counted. Lines are split at the byte b"\\n" only; `str.splitlines` would also split at U+2028, a form feed or a lone carriage
return. A byte-order mark at the start of a file is dropped. For tables and samples memory holds a row (for Arrow a batch of
rows); other formats need a few MiB.
"""

from __future__ import annotations

import codecs
import csv
import io
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ultrascale.data.files import DataError, writing
from ultrascale.data.reading.compressed import damage, import_extra, open_bytes
from ultrascale.data.reading.inputs import FilePart, InputFile
from ultrascale.data.reading.judged import (
    REPAIR,
    Document,
    invalid_utf8,
    judge_piece,
    judged,
    judged_text,
    parse_line,
)
from ultrascale.data.reading.long_lines import marked, shorten, string_pieces
from ultrascale.data.reading.samples import mds_texts, tar_samples

PIECE_BYTES = 1 << 20
LONGEST_CELL = 1 << 30
"""Most bytes of one CSV cell, which is held in memory."""
LONGEST_LINE = 4 << 20
"""Longer lines are not held in memory; see `long_lines`."""
_MAGICS = {b"\x1f\x8b": ("gzip", ".gz"), b"\x28\xb5\x2f\xfd": ("zstd", ".zst"), b"PAR1": ("Parquet", ".parquet")}
_BOM = codecs.BOM_UTF8
_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass
class PartReader:
    """The documents of one part.

    `line_numbers`: report line numbers of a JSONL file even in a later part of it, which costs reading the file up to there.
    `spool`: a folder with space for one long line.
    """

    part: FilePart
    field: str
    spool: Path
    line_numbers: bool = False
    consumed_bytes: int = 0
    """Progress, in units of `part.weight_bytes`."""

    def __iter__(self) -> Iterator[Document | DataError]:
        read = {"text": self._text, "jsonl": self._jsonl, "parquet": self._parquet, "csv": self._csv, "arrow": self._arrow,
                "tar": self._tar, "mds": self._mds}[self.part.file.kind]  # fmt: skip
        try:
            with _named_damage(self.part.file.path):
                _expect_named_kind(self.part.file)
                yield from read()
        except DataError as error:
            yield error
        self.consumed_bytes = self.part.weight_bytes

    def _text(self) -> Iterator[Document | DataError]:
        file = self.part.file
        with open_bytes(file.path, file.compression) as (stream, raw):
            first = stream.read(PIECE_BYTES)
            if len(first) < PIECE_BYTES:
                yield judged(first.removeprefix(_BOM), str(file.path), file.name, len(_BOM) if first.startswith(_BOM) else 0)
            else:
                yield Document(str(file.path), file.name, None, self._text_pieces(first, stream, raw))

    def _text_pieces(self, block: bytes, stream: BinaryIO, raw: BinaryIO) -> Iterator[str]:
        path = self.part.file.path
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = len(_BOM) if block.startswith(_BOM) else 0
        block = block[position:]
        with _named_damage(path):
            while True:
                before = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    raise invalid_utf8(str(path), position - before + error.start, error) from error
                yield judge_piece(text, f"{path}, after byte {position}")
                if not block:
                    return
                position += len(block)
                self.consumed_bytes = raw.tell()
                block = stream.read(PIECE_BYTES)

    def _jsonl(self) -> Iterator[Document | DataError]:
        file, start = self.part.file, self.part.start
        with open_bytes(file.path, file.compression) as (stream, raw):
            position = self._first_line(stream) if start else 0
            number = _count_lines(file.path, position) if self.line_numbers and 0 < position < self.part.end else 0
            named = not start or self.line_numbers
            while file.compression or position < self.part.end:
                line = stream.readline(LONGEST_LINE)
                if not line:
                    break
                number += 1
                where = f"{file.path}:{number} (byte {position})" if named else f"{file.path}, line at byte {position}"
                key = f"{file.name}:{position}"
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    with _spool(self.spool) as spooled:
                        length = _spool_line(line, stream, spooled, self.spool)
                        item = self._long_line(spooled, where, key, bom=position == 0)
                        yield item if position else _or_array_error(item, line, file.path)
                else:
                    length = len(line)
                    item = self._line(line if position else line.removeprefix(_BOM), where, key)
                    yield item if position else _or_array_error(item, line, file.path)
                position += length
                self.consumed_bytes = raw.tell() - start
            if position == 0:
                yield DataError(str(file.path), "is empty", REPAIR, "empty_file")

    def _csv(self) -> Iterator[Document | DataError]:
        """The column `field` of a table with a header, one document per row; a .tsv has tabs between columns."""
        file = self.part.file
        csv.field_size_limit(LONGEST_CELL)
        with open_bytes(file.path, file.compression) as (stream, raw):
            lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            try:
                table = csv.DictReader(lines, delimiter="\t" if ".tsv" in file.path.name.lower() else ",", strict=True)
                if self.field not in (columns := table.fieldnames or []):
                    problem = f"has no column {self.field!r}, only {', '.join(map(repr, columns[:8])) or 'none'}"
                    yield DataError(str(file.path), problem, "Name the text's column with --field.", "missing_field")
                    return
                for number, row in enumerate(table, start=1):
                    self.consumed_bytes = raw.tell()
                    yield judged_text(row[self.field], f"{file.path}:{table.line_num}", f"{file.name}:row {number}")
            except UnicodeDecodeError as error:
                yield invalid_utf8(str(file.path), error.start, error, "byte of a block")
            except csv.Error as error:
                yield DataError(f"{file.path}:{table.line_num}", f"is no row of a table: {error}", REPAIR, "broken_csv")

    def _arrow(self) -> Iterator[Document | DataError]:
        """Rows of a shard of `datasets`, which is a stream of record batches with an end mark."""
        file, row = self.part.file, 0
        pyarrow = import_extra("pyarrow")
        try:
            with open(file.path, "rb") as raw:
                raw.seek(-min(8, file.size), io.SEEK_END)
                if raw.read() != _ARROW_END:
                    raise DataError(
                        str(file.path), "is no whole Arrow stream: it lacks the mark of an end", REPAIR, "damaged_file"
                    )
                raw.seek(0)
                table = import_extra("pyarrow.ipc").open_stream(raw)
                _expect_text_column(pyarrow, table.schema, self.field, file.path)
                for batch in table:
                    self.consumed_bytes = raw.tell()
                    for value in batch.column(self.field):
                        yield _row_document(value, f"{file.path}, row {row}", f"{file.name}:{row}")
                        row += 1
        except pyarrow.ArrowException as error:
            raise DataError(str(file.path), f"is damaged: {error}", REPAIR, "damaged_file") from error

    def _tar(self) -> Iterator[Document | DataError]:
        """The text of a sample is its file with the extension `field`, else this field of its .json, else its .txt."""
        file = self.part.file
        with open_bytes(file.path, file.compression) as (stream, raw):
            for name, files in tar_samples(stream, str(file.path)):
                self.consumed_bytes = raw.tell()
                where, key = f"{file.path}, sample {name}", f"{file.name}:{name}"
                if self.field in files:
                    yield judged(files[self.field], where, key, 0)
                elif "json" in files:
                    yield self._line(files["json"], where, key)
                elif self.field == "text" and "txt" in files:
                    yield judged(files["txt"], where, key, 0)
                else:
                    wanted = "txt" if self.field == "text" else self.field
                    has = f"has no .{wanted} and no .json, only {', '.join(f'.{extension}' for extension in files)}"
                    yield DataError(where, has, "Name the text's extension with --field.", "missing_field")

    def _mds(self) -> Iterator[Document | DataError]:
        file = self.part.file
        with open_bytes(file.path, file.compression) as (stream, raw):
            for number, text in enumerate(mds_texts(stream, self.field, str(file.path))):
                self.consumed_bytes = raw.tell()
                yield judged(text, f"{file.path}, sample {number}", f"{file.name}:{number}", 0)

    def _first_line(self, stream: BinaryIO) -> int:
        """Seeks to the first line that begins in this part, and returns its position; the part's end if there is none."""
        position = self.part.start - 1
        stream.seek(position)
        while position < self.part.end:
            chunk = stream.readline(PIECE_BYTES)
            position += len(chunk)
            if not chunk or chunk.endswith(b"\n"):
                break
        return position

    def _line(self, line: bytes, where: str, key: str) -> Document | DataError:
        if not line.strip():
            return DataError(where, "is an empty line", REPAIR, "empty_line")
        try:
            value = parse_line(line, where, self.field)
        except DataError as error:
            return error
        return judged_text(value, where, key)

    def _long_line(self, spooled: BinaryIO, where: str, key: str, *, bom: bool) -> Document | DataError:
        short = shorten(spooled, LONGEST_LINE)
        if short is None:
            problem = f"has more than {LONGEST_LINE} bytes outside long strings, or a string that does not end"
            return DataError(where, problem, REPAIR, "broken_json")
        line, ranges = short
        try:
            value = parse_line(line.removeprefix(_BOM) if bom else line, where, self.field)
        except DataError as error:
            return error
        mark = marked(value)
        if mark is None:
            return judged_text(value, where, key)
        return Document(where, key, None, _long_pieces(spooled, *ranges[mark], where))

    def _parquet(self) -> Iterator[Document | DataError]:
        part, path = self.part, self.part.file.path
        pyarrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
        try:
            with parquet.ParquetFile(path, pre_buffer=False) as table:
                _expect_text_column(pyarrow, table.schema_arrow, self.field, path)
                for group in range(part.start, part.end):
                    row = 0
                    for batch in table.iter_batches(64, row_groups=[group], columns=[self.field], use_threads=False):
                        for value in batch.column(0):
                            where = f"{path}, row group {group}, row {row}"
                            yield _row_document(value, where, f"{part.file.name}:{group}:{row}")
                            row += 1
                    self.consumed_bytes = part.weight_bytes * (group + 1 - part.start) // (part.end - part.start)
                if table.metadata.num_rows == 0:
                    yield DataError(str(path), "has no rows", REPAIR, "empty_file")
        except pyarrow.ArrowException as error:
            raise DataError(str(path), f"is damaged: {error}", REPAIR, "damaged_file") from error


def _or_array_error(item: Document | DataError, first_line: bytes, path: Path) -> Document | DataError:
    """`item`, or if it is the error of a file that is one JSON array, an error that says so."""
    if isinstance(item, Document) or not first_line.removeprefix(_BOM).lstrip().startswith(b"["):
        return item
    lines = path.with_suffix(".jsonl") if path.suffix == ".json" else f"{path}.jsonl"
    remedy = f"jq -c '.[]' {shlex.quote(str(path))} > {shlex.quote(str(lines))}"
    return DataError(str(path), "is a JSON array, and one object a line is read", remedy, "broken_json")


def _expect_named_kind(file: InputFile) -> None:
    """Raises DataError if the content of a plain file starts like a compressed or Parquet file."""
    if file.compression or file.kind in ("parquet", "arrow", "mds"):
        return
    with open(file.path, "rb") as raw:
        magic = raw.read(4)
    for start, (kind, suffix) in _MAGICS.items():
        if magic.startswith(start):
            raise DataError(str(file.path), f"holds {kind} data, but is not named so", f"Name it ...{suffix}.", "wrong_name")


@contextmanager
def _named_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or (problem := damage(error)) is None:
            raise
        raise DataError(str(path), problem, REPAIR, "damaged_file") from error


@contextmanager
def _spool(folder: Path) -> Iterator[BinaryIO]:
    with writing(folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed below; only opening it is a write)
    with file:
        yield file  # type: ignore[misc]


def _spool_line(begun: bytes, stream: BinaryIO, spooled: BinaryIO, folder: Path) -> int:
    """Copies the rest of a line to a file; returns the line's length with the newline."""
    length = 0
    while begun:
        with writing(folder):
            length += spooled.write(begun)
        if begun.endswith(b"\n"):
            break
        begun = stream.readline(PIECE_BYTES)
    return length


def _long_pieces(spooled: BinaryIO, first: int, last: int, where: str) -> Iterator[str]:
    try:
        for text in string_pieces(spooled, first, last):
            yield judge_piece(text, where)
    except UnicodeDecodeError as error:
        raise invalid_utf8(where, None, error) from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(where, f"is not JSON: {error}", REPAIR, "broken_json") from error


def _count_lines(path: Path, end: int) -> int:
    """Lines that end before byte `end`."""
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (block := file.read(min(PIECE_BYTES, end))):
            count, end = count + block.count(b"\n"), end - len(block)
    return count


def _expect_text_column(pyarrow: Any, schema: Any, field: str, path: Path) -> None:
    if field not in schema.names:
        remedy = "Name the text's column with --field."
        raise DataError(str(path), f"has no column {field!r}, only {schema.names}", remedy, "missing_field")
    kind = schema.field(field).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        problem = f"column {field!r} holds {kind}, expected strings"
        raise DataError(str(path), problem, "Name the text's column with --field.", "not_text")


def _row_document(value: Any, where: str, key: str) -> Document | DataError:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        return invalid_utf8(where, error.start, error)
    return judged_text(text, where, key)
