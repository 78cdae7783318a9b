"""Nodes with local disks: which ranks see one folder, and checkpoints whose shards lie on several disks.

    ranks      0  1 | 2  3        each node's ranks write their shards under their own `root`; the lowest of them, the node's
    leaders    0  0 | 2  2        leader, creates the folder there, writes the manifest (the same on all disks) and publishes

Such a checkpoint is complete if each of its shards is on some disk. A shared file system is the case of one leader.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.checkpoint.disk.damage import expected_manifest, verify_shards
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.disk.folders import discard
from ultrascale.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from ultrascale.checkpoint.coordination import Coordinator


@dataclass(frozen=True)
class NodeDisks:
    """The disks that the ranks save to, as one rank sees them."""

    rank: int
    leaders: tuple[int, ...]
    """For each rank, the lowest rank that sees the same folder."""

    @property
    def are_shared(self) -> bool:
        """True if all ranks see one folder."""
        return not any(self.leaders)

    @property
    def leads(self) -> bool:
        """True if this rank is the lowest one on its disk."""
        return self.leaders[self.rank] == self.rank

    @property
    def mates(self) -> list[int]:
        """Ranks on this rank's disk, including itself."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[self.rank]]


def find_disks(root: Path, ranks: Coordinator) -> NodeDisks:
    """Determine which ranks see the same folder `root`, which exists on every disk. Collective; raises CheckpointError."""
    if ranks.world == 1:
        return NodeDisks(0, (0,))
    leaders: dict[int, int] = {}
    doing = f"looking for what other ranks write into {root}"
    while len(leaders) < ranks.world:
        leader = min(set(range(ranks.world)) - leaders.keys())
        mark = root / ranks.broadcast(f".write-test-{uuid.uuid4().hex}")
        try:
            ranks.agree(doing, lambda mark=mark, leader=leader: mark.mkdir() if ranks.rank == leader else None)
            seen = ranks.broadcast(ranks.gather(ranks.agree(doing, mark.exists)))
        finally:
            if ranks.rank == leader:
                with suppress(OSError):  # the next start removes it
                    mark.rmdir()
        leaders |= {rank: leader for rank, sees in enumerate(seen) if sees and rank not in leaders}
    return NodeDisks(ranks.rank, tuple(leaders[rank] for rank in range(ranks.world)))


def verify_on_disks(folder: Path, *, ranks: Coordinator, disks: NodeDisks) -> None:
    """Read every byte of a checkpoint whose shards are on several disks; the ranks of each disk share the work. Collective.

    Raises CheckpointError naming shards that are damaged, or on no disk.
    """
    doing = f"verifying {folder}"
    manifest = ranks.agree(doing, lambda: expected_manifest(folder))
    present = ranks.agree(doing, lambda: [shard for shard in manifest.shards.items() if (folder / shard[0]).exists()])
    share = present[disks.mates.index(ranks.rank) :: len(disks.mates)]
    ranks.agree(doing, lambda: verify_shards(folder, share, manifest.save_id))
    gathered = ranks.gather([manifest.save_id, [file for file, _ in share]])
    ranks.on_rank_0(doing, lambda: _expect_all(gathered or [], manifest.save_id, set(manifest.shards)))


def _expect_all(gathered: list[tuple[str, list[str]]], save_id: str, shards: set[str]) -> None:
    """On rank 0: raises CheckpointError unless the disks together have all shards of one save."""
    lacking = sorted(shards.difference(*(files for of, files in gathered if of == save_id)))
    if lacking:
        raise CheckpointError(f"{lacking[:20]} of this save are on no node's disk. Use another checkpoint.")


def shards_to_bring(read: Sequence[Collection[str]], shards: Collection[str], disks: NodeDisks) -> list[list[str]]:
    """For each rank, the shards that it fetches to the disk that it leads: those that its disk's ranks read (`read`, by rank).
    Shards that no rank reads go to the first disk, so that all disks together hold the checkpoint."""
    by_rank: list[set[str]] = [set() for _ in read]
    for leader, files in zip(disks.leaders, read, strict=True):
        by_rank[leader].update(files)
    by_rank[0].update(set(shards).difference(*by_rank))
    return [sorted(files) for files in by_rank]


def remove_published(folder: Path, save_id: str) -> None:
    """Remove a checkpoint that was published on this disk although publishing on another disk failed."""
    with suppress(CheckpointError, OSError):
        if read_manifest(folder).save_id == save_id:
            discard(folder)
