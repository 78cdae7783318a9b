"""Nodes whose disks do not see each other: what docs/object-stores.md says of them."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from ultrascale import checkpoint
from ultrascale.checkpoint import Slice


def save_on_own_disk(rank: int, disks: Path) -> tuple[str, list[str]]:
    """Save half a tensor into a folder that the other rank does not see; the error, and what is left on this disk."""
    root = disks / f"node-{rank}"
    half = {"w": [Slice(torch.full((2, 3), float(rank)), (4, 3), (2 * rank, 0))]}
    try:
        checkpoint.save(root, 1, half, {})
    except checkpoint.CheckpointError as error:
        return str(error), sorted(path.name for path in root.iterdir()) if root.exists() else []
    return "", []


def test_a_save_on_disks_of_two_nodes_fails_on_both_and_publishes_nothing(tmp_path: Path):
    outcomes = run_ranks(2, save_on_own_disk, tmp_path)
    for told, left in outcomes:
        assert "rank 1 of 2" in told and "step-00000001" in told and left == []
    assert all(checkpoint.newest_valid(tmp_path / f"node-{rank}") is None for rank in (0, 1))


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_see_one_disk_save_into_it(tmp_path: Path, world: int):
    run_ranks(world, save_on_one_disk, tmp_path / "shared", world)
    tensors, _ = checkpoint.load_full(tmp_path / "shared/step-00000001")
    assert tensors["w"].tolist() == [[float(rank)] * 3 for rank in range(world) for _ in range(2)]


def save_on_one_disk(rank: int, root: Path, world: int) -> None:
    part = {"w": [Slice(torch.full((2, 3), float(rank)), (2 * world, 3), (2 * rank, 0))]}
    checkpoint.save(root, 1, part, {})


def begin_saving(rank: int, disks: Path) -> str:
    try:
        checkpoint.Saver(disks / f"node-{rank // 2}").close()
    except checkpoint.CheckpointError as error:
        return str(error)
    return ""


def test_disks_of_two_nodes_are_told_before_the_first_step(tmp_path: Path):
    for told in run_ranks(4, begin_saving, tmp_path):
        assert "ranks [2, 3] of 4: it is not there: this node has a disk of its own" in told
    assert not [*tmp_path.glob("node-*/*")]
    assert run_ranks(2, begin_saving, tmp_path) == ["", ""]
