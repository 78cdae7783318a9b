"""Checkpoints of another release's format: never passed over for an older one, and never removed."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError, Saver, UnknownVersionError
from ultrascale.checkpoint.listing import summarize
from ultrascale.checkpoint.manifest import MANIFEST_NAME

ONE = {"w": torch.ones(2, 2)}


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def rewrite(folder: Path, first: str = '{{"checksum":"crc32:{crc:08x}",\n', **changes: object) -> Path:
    """Change fields of a manifest as another release might write them, with a checksum that is right."""
    content = json.loads((folder / MANIFEST_NAME).read_text())
    del content["checksum"]
    body = json.dumps(content | changes, separators=(",", ":"))[1:] + "\n"
    (folder / MANIFEST_NAME).write_text(first.format(crc=zlib.crc32(body.encode())) + body)
    return folder


def saved(root: Path, *steps: int) -> list[Path]:
    return [checkpoint.save(root, step, ONE, {}) for step in steps]


OTHERS = {
    "a newer version": {"version": 2},
    "a newer version with more keys": {"version": 2, "compression": "zstd", "shards": []},
    "another kind of version": {"version": "1.1"},
    "another format": {"format": "ultrascale-checkpoint-lite"},
    "another checksum": {"version": 3, "first": '{{"checksum":"sha256:00",\n'},
}


def search_and_tell(rank: int, root: Path) -> str:
    with pytest.raises(UnknownVersionError) as caught:
        checkpoint.search(root)
    return str(caught.value)


@pytest.mark.catalogue(28)
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_a_newest_checkpoint_of_another_format_is_not_passed_over_on_any_rank(tmp_path, changes):
    _, newest = saved(tmp_path, 1, 2)
    rewrite(newest, **changes)
    version = changes.get("version", 1)
    for told in run_ranks(2, search_and_tell, tmp_path):
        assert f"{newest / MANIFEST_NAME}: format is " in told and f" version {version!r}, expected " in told
        assert (
            "expected 'ultrascale-checkpoint' version 1, which this release reads: another release wrote it. Go on with" in told
        )


@pytest.mark.catalogue(28)
def test_a_version_that_a_flipped_bit_changed_is_damage(tmp_path):
    good, newest = saved(tmp_path, 1, 2)
    manifest = newest / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"version":1', b'"version":3'))
    assert checkpoint.search(tmp_path).folder == good


@pytest.mark.catalogue(38)
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS.keys())
def test_saving_removes_nothing_of_another_format_at_its_start_or_later(tmp_path, changes):
    older, same_step, newer = (rewrite(folder, **changes) for folder in saved(tmp_path, 1, 3, 90))
    killed = rewrite(saved(tmp_path, 70)[0], **changes).rename(tmp_path / ".step-00000070.tmp-0123abcd")
    before = {folder.name: contents(folder) for folder in (older, same_step, newer, killed)}
    with Saver(tmp_path, keep=1) as saving:
        for step in (2, 3, 4, 5):
            saving.save(step, ONE, {})
    aside = sorted(tmp_path.glob(".step-00000003.old-*"))  # a save of the same step takes its name
    assert [contents(folder) for folder in (older, *aside, newer, killed)] == list(before.values())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{step:08d}" for step in (1, 5, 90)]


@pytest.mark.catalogue(38)
def test_folders_that_are_no_checkpoints_are_never_removed_whatever_they_are_called(tmp_path):
    for name in ("step-00000001", "step-00000002", "step-backup", "step-1", ".step-00000004.old-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("mine")
    (tmp_path / "step-00000002" / MANIFEST_NAME).write_text('{"format": "someone else\'s"}')
    before = contents(tmp_path)
    with Saver(tmp_path, keep=1) as saving:
        for step in (3, 4, 4, 5):
            saving.save(step, ONE, {})
    assert before.items() <= contents(tmp_path).items()


def test_a_list_of_checkpoints_says_which_another_release_wrote(tmp_path):
    _, newest = saved(tmp_path, 1, 2)
    rewrite(newest, version=2)
    problems = [one.problem for one in summarize(tmp_path, read_all=True)]
    assert "another release wrote it" in str(problems[0]) and problems[1] is None


def test_one_named_checkpoint_of_another_format_is_refused(tmp_path):
    (folder,) = saved(tmp_path, 1)
    rewrite(folder, version=2)
    with pytest.raises(CheckpointError, match="version 2, expected"):
        checkpoint.load_full(folder)
