"""The object that is a stored checkpoint: what was written is read, and nothing else is believed."""

import json
from typing import Any

import pytest

from ultrascale.checkpoint.disk.checksum import checksum_text, crc32
from ultrascale.checkpoint.errors import CheckpointError, UnknownVersionError
from ultrascale.checkpoint.stored.index import Index, decode, encode, key_of, step_of
from ultrascale.storage import PartObject

INDEX = Index(
    step=120, save_id="6f" * 16, saved_at=1.5e9, tensors=3,
    files={"manifest.json": (PartObject(10, 0xAB),), "rank-00000.safetensors": (PartObject(32, 1), PartObject(7, 0xFFFFFFFF))},
)  # fmt: skip


def sealed(**changes: Any) -> bytes:
    """The index with other values, under a checksum that is right."""
    content = json.loads(encode(INDEX))
    content.pop("checksum")
    data = json.dumps({**content, **changes}).encode()[1:] + b"\n"
    return f'{{"checksum":"{checksum_text(crc32(data))}",\n'.encode() + data


def test_what_was_written_is_read():
    assert decode(encode(INDEX), "here") == INDEX
    assert INDEX.bytes == 39 and len(INDEX.part_keys()) == 3
    assert step_of(key_of(120).rsplit("/", 1)[1]) == 120 and step_of("newest.json") is None


def test_a_change_of_any_byte_is_seen():
    data = encode(INDEX)
    for at in range(len(data)):
        with pytest.raises(CheckpointError):
            decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "here")
        with pytest.raises(CheckpointError):
            decode(data[:at], "here")


@pytest.mark.parametrize(
    "changes",
    [{"step": -1}, {"step": True}, {"step": "1"}, {"save_id": "../../etc"}, {"save_id": 3}, {"tensors": 1.5}, {"files": {}},
     {"files": []}, {"files": {"manifest.json": [[1, "00"]]}}, {"files": {"manifest.json": [[-1, "00000000"]]}},
     {"files": {"manifest.json": [], "../x.safetensors": []}}, {"files": {"manifest.json": [], "a/b.safetensors": []}},
     {"files": {"manifest.json": [[1, "0000000g"]]}}, {"files": {"manifest.json": [[1]]}}, {"saved_at": []}],
)  # fmt: skip
def test_nothing_in_it_is_believed(changes: dict[str, Any]):
    with pytest.raises(CheckpointError, match="not an index that we wrote"):
        decode(sealed(**changes), "here")


def test_another_release_is_named():
    with pytest.raises(UnknownVersionError, match="another release wrote it"):
        decode(sealed(version=2), "here")
