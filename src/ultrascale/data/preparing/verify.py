"""Verification that shards still hold the prepared content: a sample of blocks at once, all blocks where there is time.

    sample_sha256            the sizes of `.bin` and `.idx`, and 8 blocks of 4 KiB of each, from its first byte to its last
    bin_sha256, idx_sha256   everything

A sample costs the same however large a shard is. It detects a swapped or rewritten shard; only the full checksum detects a
changed token between two blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ultrascale.data.files import DataError, sha256_of
from ultrascale.data.indexed import prefix_paths
from ultrascale.data.manifest import ShardRecord

BLOCKS, BLOCK_BYTES = 8, 4096
NOT_AS_PREPARED = f"does not hold what was prepared: of {BLOCKS} blocks of its .bin and .idx some are not the manifest's"
REMEDY = "Run the same `ultrascale data prepare` again: it makes damaged shards anew."


def sample_of(prefix: Path, num_blocks: int = BLOCKS) -> str:
    """The digest of `num_blocks` blocks of both files, which are all of a file of so many blocks. Raises OSError."""
    with ExitStack() as opened:
        files = [opened.enter_context(open(path, "rb")).fileno() for path in prefix_paths(prefix)]
        pairs = [(os.fstat(file).st_size, partial(os.pread, file, BLOCK_BYTES)) for file in files]
        return digest_of_blocks(pairs, num_blocks)


def digest_of_blocks(files: Iterable[tuple[int, Callable[[int], bytes]]], num_blocks: int = BLOCKS) -> str:
    """The digest of `num_blocks` blocks of each file, given as its size and a function that reads the block at an offset."""
    digest = hashlib.sha256()
    for size, block_at in files:
        digest.update(size.to_bytes(8, "little"))
        for block in range(num_blocks):
            digest.update(block_at(block * max(0, size - BLOCK_BYTES) // (num_blocks - 1)))
    return digest.hexdigest()


def expect_sample(prefix: Path, record: ShardRecord) -> None:
    """Raises DataError if the sample differs from the manifest's; manifests of older releases have none."""
    if record.sample_sha256 and sample_of(prefix) != record.sample_sha256:
        raise DataError(str(prefix), NOT_AS_PREPARED, REMEDY)


def expect_whole(prefix: Path, record: ShardRecord, after_block: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Raises DataError, naming the file, if a checksum differs from the manifest's. `after_block`: called with each block's
    bytes."""
    for file, expected in zip(prefix_paths(prefix), (record.bin_sha256, record.idx_sha256), strict=True):
        if sha256_of(file, after_block) != expected:
            raise DataError(str(file), "has another checksum than the manifest says", REMEDY)
