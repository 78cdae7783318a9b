"""The index object of a stored checkpoint: every file of its folder, by parts, in JSON, put last and conditionally.

The first line holds the checksum of all bytes after it, as in a folder's manifest. The index is validated: names are those
allowed in a checkpoint's folder, lengths add up, and the parts' checksums are compared with the data.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ultrascale.checkpoint.disk.checksum import checksum_text, crc32
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.manifest import FIRST_LINE, MANIFEST_NAME, expect_known_format, with_checksum
from ultrascale.storage import PartObject

FORMAT, VERSION = "ultrascale-stored-checkpoint", 1
FOLDER = "checkpoints"
NEWEST = f"{FOLDER}/newest.json"
_FILE = re.compile(r"manifest\.json|[A-Za-z0-9_-][A-Za-z0-9_.-]{0,200}\.safetensors")
_SAVE_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"step-(\d{8,18})")


@dataclass(frozen=True)
class Index:
    """The contents of a stored checkpoint."""

    step: int
    save_id: str
    """Identifier of the save on disk that was uploaded."""
    saved_at: float | None
    tensors: int
    files: dict[str, tuple[PartObject, ...]]

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(part.bytes for name, parts in self.files.items() if name != MANIFEST_NAME for part in parts)

    def prefix(self, file: str) -> str:
        """Prefix of the keys of a file's parts."""
        return f"{folder_of(self.step, self.save_id)}/{file}"

    def part_keys(self) -> list[str]:
        """Keys of all parts."""
        return [part.key(self.prefix(file), i) for file, parts in self.files.items() for i, part in enumerate(parts)]


def name_of(step: int) -> str:
    """Name of the step's folder, as on disk."""
    return f"step-{step:08d}"


def key_of(step: int) -> str:
    """Key of the object that publishes a step."""
    return f"{FOLDER}/{name_of(step)}.json"


def folder_of(step: int, save_id: str) -> str:
    """Prefix of the parts of one save of a step."""
    return f"{FOLDER}/{name_of(step)}/{save_id}"


def step_of(name: str) -> int | None:
    """The step in `step-00000120` or `step-00000120.json`; None for another name."""
    match = _NAME.fullmatch(name.removesuffix(".json"))
    return None if match is None else int(match[1])


def encode(index: Index) -> bytes:
    """The object's bytes."""
    files = {name: [[part.bytes, f"{part.crc:08x}"] for part in parts] for name, parts in index.files.items()}
    content = {
        "format": FORMAT, "version": VERSION, "save_id": index.save_id, "step": index.step, "saved_at": index.saved_at,
        "tensors": index.tensors, "files": files,
    }  # fmt: skip
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")[1:] + b"\n"
    return with_checksum(data)


def decode(data: bytes, where: str) -> Index:
    """The index in `data`, checked; `where` names it in errors. Raises CheckpointError (UnknownVersionError)."""
    first, _, rest = data.partition(b"\n")
    line = FIRST_LINE.fullmatch(first)
    if line is None or checksum_text(crc32(rest)) != line[1].decode():
        raise CheckpointError(f"{where}: its checksum is not that of its bytes: it is damaged. Use another checkpoint.")
    content: Any = None
    with suppress(ValueError, RecursionError):
        content = json.loads(b"{" + rest)
    expect_known_format(content, where, FORMAT, VERSION)
    try:
        return _index(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: not an index that we wrote ({error}). Use another checkpoint.") from error


def _index(content: dict[str, Any]) -> Index:
    files = {_expect(_FILE, name): tuple(_part(*part) for part in parts) for name, parts in content["files"].items()}
    if MANIFEST_NAME not in files:
        raise ValueError(f"{MANIFEST_NAME} is not among its files")
    saved_at = content["saved_at"]
    return Index(
        step=_count(content["step"]),
        save_id=_expect(_SAVE_ID, content["save_id"]),
        saved_at=None if saved_at is None else float(saved_at),
        tensors=_count(content["tensors"]),
        files=files,
    )


def _part(size: Any, crc: Any) -> PartObject:
    if not isinstance(crc, str) or len(crc) != 8:
        raise ValueError(f"{crc!r:.40} is no checksum")
    return PartObject(_count(size), int(crc, 16))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _expect(pattern: re.Pattern[str], value: Any) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r:.80} is no name that we give")
    return value
