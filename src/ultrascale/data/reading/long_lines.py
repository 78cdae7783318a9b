"""A JSON line too long for memory: its one long string is found and streamed, the rest is parsed by `json` as usual.

The line is copied to an anonymous file. One pass over it replaces every long string by a short mark and records its position;
the result is a small line of JSON. If the wanted field's value is such a mark, its string is decoded in pieces. So a document
of 1 GB in one line temporarily costs 1 GB of disk, and no memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

PIECE_BYTES = 1 << 20
LONG_STRING = 1 << 16
_MARK = "\\u0000ultrascale long string "
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
# Whole units only: a run without escapes, a pair of surrogates, another \uXXXX, or a short escape.
_UNITS = re.compile(
    r"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+", re.DOTALL
)


def shorten(
    file: BinaryIO, limit: int, *, long_string: int = LONG_STRING, piece_bytes: int = PIECE_BYTES
) -> tuple[bytes, list[tuple[int, int]]] | None:
    """The line with its strings of more than `long_string` bytes replaced by marks, and their positions (first and last byte,
    without the quotes). Reads `piece_bytes` at a time.

    None if more than `limit` bytes remain, or the line ends inside a string.
    """
    shortened, ranges = bytearray(), []
    string: bytearray | None = None
    first = position = 0
    rest = b""
    file.seek(0)
    while block := file.read(piece_bytes):
        block, offset = rest + block, 0
        position -= len(rest)
        rest = b""
        while offset < len(block):
            if string is None:
                quote = block.find(b'"', offset)
                stop = len(block) if quote < 0 else quote + 1
                shortened += block[offset:stop]
                offset = stop
                if quote >= 0:
                    string, first = bytearray(), position + offset
                if len(shortened) > limit:
                    return None
                continue
            stop = _INSIDE.match(block, offset).end()  # type: ignore[union-attr]
            if len(string) <= long_string:
                string += block[offset:stop]
            if stop == len(block) or block[stop : stop + 1] == b"\\":  # the escape at the block's end is not whole
                rest = block[stop:]
                offset = len(block)
                continue
            if len(string) > long_string:
                shortened += f"{_MARK}{len(ranges)}".encode()
                ranges.append((first, position + stop))
            else:
                shortened += string
            shortened += b'"'
            string, offset = None, stop + 1
        position += len(block)
    return None if string is not None else (bytes(shortened), ranges)


def marked(value: object) -> int | None:
    """Index of the long string that a decoded value represents, if it is a mark."""
    mark = json.loads(f'"{_MARK}"')
    return int(value[len(mark) :]) if isinstance(value, str) and value.startswith(mark) else None


def string_pieces(file: BinaryIO, first: int, last: int, *, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
    """The decoded text of the string at bytes first..last-1, in pieces of at most `piece_bytes`.

    Raises UnicodeDecodeError or ValueError where it is not valid UTF-8 or JSON; positions count from the piece.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    file.seek(first)
    rest = ""
    while first < last:
        block = file.read(min(piece_bytes, last - first))
        first += len(block)
        rest += decoder.decode(block, final=first >= last)
        whole = len(rest) if first >= last else _UNITS.match(rest).end()  # type: ignore[union-attr]
        if len(rest) - whole > 12:  # no unit is longer: the escape is wrong, and json says how
            whole = len(rest)
        yield json.loads(f'"{rest[:whole]}"')
        rest = rest[whole:]
