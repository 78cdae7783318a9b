"""Whatever happens to the files of a checkpoint is noticed before a number changes, and the one before is used.

Controls take a guard out of loading and call a test again, which must then fail.
"""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.disk.files import write_shard
from ultrascale.checkpoint.manifest import decode

FLIPS = 200


def state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(64.0).reshape(8, 8) + step, "m": torch.full((3,), step, dtype=torch.int64)}


def save_steps(rank: int, root: Path) -> None:
    for step in (1, 2):
        checkpoint.save(root, step, state(step), {"step": step})


@pytest.fixture
def root(tmp_path) -> Path:
    """Steps 1 and 2, each of two shards."""
    run_ranks(2, save_steps, tmp_path)
    return tmp_path


def refusal(folder: Path) -> str:
    """Why `folder` is refused, by every way to load it; targets must stay as they are."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder, targets)
    assert all((target == 0).all() for target in targets.values())
    with pytest.raises(CheckpointError):
        checkpoint.load_full(folder)
    return str(caught.value)


@pytest.mark.catalogue(27)
def test_two_hundred_flipped_bits_are_all_detected(root):
    folder = root / "step-00000002"
    places = [(path, byte) for path in sorted(folder.iterdir()) for byte in range(path.stat().st_size)]
    for path, byte in random.Random(0).sample(places, FLIPS):
        good = path.read_bytes()
        bad = bytearray(good)
        bad[byte] ^= 1 << random.Random(byte).randrange(8)
        path.write_bytes(bad)
        assert path.name in refusal(folder), (path.name, byte)
        path.write_bytes(good)
    checkpoint.verify(folder)


@pytest.mark.catalogue(28)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_named(root, file, share):
    path = root / "step-00000002" / file
    os.truncate(path, int(path.stat().st_size * share))
    assert str(path) in refusal(path.parent)


@pytest.mark.catalogue(28)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
def test_a_missing_file_is_named(root, file):
    path = root / "step-00000002" / file
    path.unlink()
    assert f"{path}: missing" in refusal(path.parent)


@pytest.mark.catalogue(28)
def test_a_longer_file_is_named(root):
    path = root / "step-00000002" / "rank-00000.safetensors"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0")
    assert f"{path}: {size + 1} bytes long, expected {size}" in refusal(path.parent)


@pytest.mark.catalogue(29)
def test_a_shard_of_another_step_is_told_from_damage(root):
    name = "rank-00000.safetensors"
    shutil.copy(root / "step-00000001" / name, root / "step-00000002" / name)
    assert "of step '1', expected save" in refusal(root / "step-00000002")
    assert "shards of two checkpoints are mixed" in refusal(root / "step-00000002")


@pytest.mark.catalogue(28)
def test_shards_of_two_ranks_changed_for_each_other_are_detected(root):
    folder = root / "step-00000002"
    first, second = folder / "rank-00000.safetensors", folder / "rank-00001.safetensors"
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    assert "rank-0000" in refusal(folder)


@pytest.mark.catalogue(28)
def test_a_shard_that_the_manifest_does_not_know_is_detected(root):
    folder = root / "step-00000002"
    shutil.copy(folder / "rank-00000.safetensors", folder / "rank-00002.safetensors")
    assert "['rank-00002.safetensors'] are not in its manifest" in refusal(folder)


@pytest.mark.catalogue(28)
def test_a_folder_renamed_to_another_step_is_detected(root):
    shutil.copytree(root / "step-00000001", root / "step-00000007")
    assert "holds step 1, expected step 7" in refusal(root / "step-00000007")
    assert checkpoint.newest_valid(root) == root / "step-00000002"


@pytest.mark.catalogue(34)
@pytest.mark.parametrize("file", ["manifest.json", "rank-00001.safetensors"])
def test_links_and_pipes_in_place_of_files_are_not_followed(root, file):
    path = root / "step-00000002" / file
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")
    assert f"{path}: missing or unreadable, links included" in refusal(path.parent)
    path.unlink()
    os.mkfifo(path)
    assert f"{path}: expected a regular file" in refusal(path.parent)


@pytest.mark.catalogue(34)
def test_a_link_in_place_of_a_checkpoint_is_not_followed(root):
    (root / "step-00000003").symlink_to(root / "step-00000002")
    assert "cannot be opened as a folder that is no link" in refusal(root / "step-00000003")


@pytest.mark.catalogue(31)
def test_a_manifest_that_points_outside_its_folder_is_refused(root):
    folder = root / "step-00000002"
    text = (folder / "manifest.json").read_bytes()
    for name in (b"../step-00000001/rank-0", b"/etc/passwd", b".", b".."):
        changed = text.replace(b"rank-00000.safetensors", name).split(b"\n", 1)[1]
        with pytest.raises(CheckpointError, match="shard name"):
            decode(with_checksum(changed), "here")


def with_checksum(rest: bytes) -> bytes:
    import zlib

    return b'{"checksum":"crc32:%08x",\n' % zlib.crc32(rest) + rest


def search_with_all_ranks(rank: int, root: Path) -> tuple[str | None, list[tuple[int, str]]]:
    found = checkpoint.search(root)
    return found.folder.name if found.folder else None, [(each.step, each.reason) for each in found.rejected]


@pytest.mark.catalogue(27)
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
def test_ranks_agree_to_fall_back_and_name_the_damage(root, file):
    path = root / "step-00000002" / file
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    answers = run_ranks(2, search_with_all_ranks, root)
    assert answers[0] == answers[1]
    folder, ((step, reason),) = answers[0]
    assert (folder, step) == ("step-00000001", 2)
    assert file in reason
    assert "checksum is crc32:" in reason


def test_no_checkpoint_is_found_where_none_is_valid(root):
    for step in (1, 2):
        (root / f"step-0000000{step}" / "manifest.json").write_text("{}")
    (root / ".step-00000009.tmp-00000000").mkdir()
    found = checkpoint.search(root)
    assert found.folder is None
    assert [each.step for each in found.rejected] == [2, 1]
    assert checkpoint.newest_valid(root / "nowhere") is None


@pytest.mark.catalogue(31)
def test_a_header_that_lies_about_its_length_is_refused_without_reading_it(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.ones(4)}, {})
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[:8] = (2**63 - 1).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum is"):
        checkpoint.verify(folder)


def test_a_shard_is_never_written_over(tmp_path):
    (tmp_path / "rank-00000.safetensors").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_shard(tmp_path, "rank-00000.safetensors", [], save_id="0" * 32, step=1)
    assert (tmp_path / "rank-00000.safetensors").read_bytes() == b"mine"
