"""The fast CRC-32 is zlib's, and files are read as often as need be."""

from __future__ import annotations

import importlib
import random
import sys
import zlib
from contextlib import nullcontext

import pytest
import torch

from ultrascale import checkpoint
from ultrascale.checkpoint import manifest
from ultrascale.checkpoint.disk import checksum, files
from ultrascale.storage import checksum as storage_checksum


def test_the_fast_checksum_is_zlibs_at_every_length_and_start():
    assert checksum.crc32.__module__ != zlib.__name__, "isal is a dependency of the tests"
    draw = random.Random(0)
    for length in (*range(70), 4095, 4096, 1 << 20, (1 << 20) + 7):
        data, start = draw.randbytes(length), draw.getrandbits(32)
        assert checksum.crc32(data, start) == zlib.crc32(data, start)
        assert checksum.crc32(memoryview(data)) == zlib.crc32(data)


def test_where_isal_is_not_installed_what_it_checksummed_still_verifies(tmp_path, monkeypatch):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.arange(1000.0)}, {})
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    try:
        plain = importlib.reload(storage_checksum)
        assert plain.crc32 is zlib.crc32
        for module in (files, manifest):
            monkeypatch.setattr(module, "crc32", plain.crc32)
        checkpoint.verify(folder)
    finally:
        monkeypatch.undo()
        importlib.reload(storage_checksum)


def test_a_shard_of_many_blocks_is_verified_from_its_first_byte_to_its_last(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.arange(3.5 * files.BLOCK_BYTES / 4)}, {})
    shard = folder / "rank-00000.safetensors"
    content = shard.read_bytes()
    (told,) = files.read_manifest(folder).shards.values()
    assert told.checksum == checksum.checksum_text(zlib.crc32(content))
    checkpoint.verify(folder)
    for at in (400, len(content) // 2, len(content) - 1):
        shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(checkpoint.CheckpointError, match="its bytes have changed"):
            checkpoint.verify(folder)


@pytest.mark.parametrize("verified", [True, False])
def test_what_a_search_has_just_read_is_not_verified_again(tmp_path, verified):
    """So that damage in between is loaded."""
    checkpoint.save(tmp_path, 1, {"w": torch.arange(1000.0)}, {})
    found, here = checkpoint.newest_valid(tmp_path), {"w": torch.zeros(1000)}
    assert found is not None
    shard = found / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    with nullcontext() if verified else pytest.raises(checkpoint.CheckpointError, match="its bytes have changed"):
        checkpoint.load(found, here, verified=verified)
        assert torch.equal(here["w"][:-1], torch.arange(999.0)) and here["w"][-1] != 999.0
