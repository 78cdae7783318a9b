"""SIGKILL at every named point of saving, publishing, pruning and loading: what is found afterwards is whole.

`survives`, `prunes_safely` and `loads_a_whole_one` are the claims; the last tests plant bugs into publishing, pruning and
loading, and require them to fail.
"""

import re
import signal
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from ultrascale import checkpoint
from ultrascale.checkpoint import saver, saving
from ultrascale.checkpoint.disk import damage, folders
from ultrascale.failpoints import VARIABLE, failpoint

SAVING = ["save.start", "save.folder", "save.block", "save.shard", "save.shards", "save.manifest"]
PUBLISHING = ["publish.before", "publish.renamed", "publish.synced"]
REPLACING = ["publish.aside", "discard.before", "discard.renamed", "discard.removed"]
ON_RANK_1 = ["save.block", "save.shard"]
SOURCES = Path(checkpoint.__file__).parent
STEP = re.compile(r"step-\d+")


def state(version: int) -> dict[str, torch.Tensor]:
    """Numbers that all tell their version, in more than one tensor and more than one shard."""
    return {f"w{i}": torch.full((6, 5), float(version)) for i in range(4)}


def version_of(folder: Path | None) -> int | None:
    """The one version that all numbers and the metadata tell. None if there is no checkpoint; fails if it is a mixture."""
    if folder is None:
        return None
    tensors, metadata = checkpoint.load_full(folder)
    versions = {number for tensor in tensors.values() for number in tensor.flatten().tolist()} | {metadata["version"]}
    assert len(versions) == 1, f"{folder} is a mixture of {versions}"
    return int(versions.pop())


def save_version(rank: int, root: Path, step: int, version: int) -> None:
    checkpoint.save(root, step, state(version), {"version": version})


def save_non_atomically(rank: int, root: Path, step: int, version: int) -> None:
    """The planted bug: the old folder goes before the new one has its name."""

    def careless_publish(temporary: Path, final: Path) -> None:
        if final.exists():
            folders.discard(final)
        temporary.rename(final)

    saving.publish = careless_publish
    save_version(rank, root, step, version)


def save_in_place(rank: int, root: Path, step: int, version: int) -> None:
    """The planted bug: files are written where the old checkpoint lives."""
    saving.temporary_folder = lambda root, step, save_id: saving.step_folder(root, step)
    saving._make_temporary = lambda plan: [path.unlink() for path in saving.step_folder(root, step).iterdir()]
    saving.publish = lambda temporary, final: None
    save_version(rank, root, step, version)


def save_and_prune(rank: int, root: Path) -> None:
    with checkpoint.Saver(root, keep=1) as saver:
        for step in (1, 2, 3):
            saver.save(step, state(step), {"version": step})


def prune_the_newest_first(rank: int, root: Path) -> None:
    """The planted bug: what goes is the wrong end of the list."""

    def prune(self: saver.Saver, step: int, newest: Path) -> None:
        found = self._ranks.on_rank_0("listing checkpoints", lambda: self._listed(up_to=step))
        if len(found) > self.keep:
            self._ranks.on_rank_0("removing old checkpoints", lambda: saver.discard(self.root / found[0][1]))

    saver.Saver._prune = prune
    save_and_prune(rank, root)


def prune_in_place(rank: int, root: Path) -> None:
    """The planted bug: a checkpoint that is being removed keeps its name."""

    def careless_discard(folder: Path) -> None:
        for path in sorted(folder.iterdir(), key=lambda path: path.suffix != ".safetensors"):
            path.unlink()
            failpoint("discard.renamed")
        folder.rmdir()

    saver.discard = careless_discard
    save_and_prune(rank, root)


def load_newest(rank: int, root: Path) -> list[float]:
    """All numbers that the newest checkpoint has, after the search has read it."""
    targets, folder = state(0), checkpoint.newest_valid(root)
    assert folder is not None
    checkpoint.load(folder, targets, verified=True)
    return sorted({number for tensor in targets.values() for number in tensor.flatten().tolist()})


def load_without_checksums(rank: int, root: Path) -> list[float]:
    """The planted bug: whatever is as long as it should be is loaded."""
    damage.verify_shard = lambda folder, file, shard, save_id: None
    return load_newest(rank, root)


def load_version(rank: int, folder: Path) -> float:
    targets = state(0)
    checkpoint.load(folder, targets)
    return targets["w3"][5, 4].item()


def kill_at(point: str, rank: int, hit: int, fn, *arguments) -> None:
    """Run `fn` on two ranks, one of which dies at the point; the other must end by itself, without a time-out."""
    outcomes = run_ranks(2, fn, *arguments, environment={VARIABLE: f"{point}:{rank}:{hit}"}, failures="return")
    assert outcomes[rank].kind == "died", f"{point} was not reached"
    assert outcomes[rank].exitcode == -signal.SIGKILL
    assert outcomes[1 - rank] is None or outcomes[1 - rank].kind in ("CheckpointError", "LostContactError"), outcomes[1 - rank]


def survives(point: str, rank: int, root: Path, save_over, *, step: int) -> bool:
    """Whether step 1 of version 1, or all of version 2, is found after a kill during a save of version 2."""
    run_ranks(2, save_version, root, 1, 1)
    kill_at(point, rank, 1, save_over, root, step, 2)
    try:
        return version_of(checkpoint.newest_valid(root)) in (1, 2)
    except AssertionError:
        return False


def prunes_safely(point: str, hit: int, root: Path, work) -> bool:
    """Whether the newest whole checkpoint is found after a kill in the `hit`-th removal, and nothing half removed."""
    kill_at(point, 0, hit, work, root)
    found = checkpoint.search(root)
    named = [folder for folder in root.iterdir() if STEP.fullmatch(folder.name)]
    return found.folder is not None and version_of(found.folder) == hit + 1 and all(map(is_whole, named))


def is_whole(folder: Path) -> bool:
    try:
        return version_of(folder) is not None
    except checkpoint.CheckpointError:
        return False


def loads_a_whole_one(point: str, root: Path, work) -> bool:
    """Whether version 1 is what is loaded where a bit of version 2 is flipped, after a kill while loading."""
    for version in (1, 2):
        run_ranks(2, save_version, root, version, version)
    shard = sorted((root / "step-00000002").glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    kill_at(point, 0, 1, work, root)
    return run_ranks(2, work, root) == [[1.0]] * 2


def test_every_named_point_is_killed_at_here():
    sources = (path for path in SOURCES.rglob("*.py") if path.parent.name != "stored")  # those: tests/storage/test_faults.py
    named = set(re.findall(r'failpoint\("([a-z.]+)"\)', "".join(path.read_text() for path in sources)))
    assert named == {*SAVING, *PUBLISHING, *REPLACING, "load.verified", "load.read"}


@pytest.mark.catalogue(1)
@pytest.mark.parametrize("point", SAVING + PUBLISHING)
def test_a_kill_while_saving_a_new_step_leaves_the_old_or_the_new_one(tmp_path, point):
    assert survives(point, 0, tmp_path, save_version, step=2)
    expected = 2 if point in ("publish.renamed", "publish.synced") else 1
    assert version_of(checkpoint.newest_valid(tmp_path)) == expected


@pytest.mark.catalogue(1)
@pytest.mark.parametrize("point", ON_RANK_1)
def test_a_kill_of_another_rank_leaves_the_old_one(tmp_path, point):
    assert survives(point, 1, tmp_path, save_version, step=2)
    assert version_of(checkpoint.newest_valid(tmp_path)) == 1


@pytest.mark.catalogue(1, 30)
@pytest.mark.parametrize("point", [*SAVING, *PUBLISHING, *REPLACING])
def test_a_kill_while_replacing_the_only_checkpoint_leaves_the_old_or_the_new_one(tmp_path, point):
    assert survives(point, 0, tmp_path, save_version, step=1)


@pytest.mark.catalogue(1, 30)
@pytest.mark.parametrize("point", ["publish.aside", "discard.renamed"])
def test_after_a_kill_the_next_run_goes_on_and_leaves_no_litter(tmp_path, point):
    assert survives(point, 0, tmp_path, save_version, step=1)
    with checkpoint.Saver(tmp_path) as saver:
        saver.save(1, state(3), {"version": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert version_of(tmp_path / "step-00000001") == 3


@pytest.mark.catalogue(1, 38)
@pytest.mark.parametrize("hit", [1, 2])
@pytest.mark.parametrize("point", ["discard.before", "discard.renamed", "discard.removed"])
def test_a_kill_while_pruning_leaves_the_newest_and_nothing_half_removed_is_found(tmp_path, point, hit):
    assert prunes_safely(point, hit, tmp_path, save_and_prune)
    run_ranks(2, save_and_prune, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.catalogue(5)
@pytest.mark.parametrize("point", ["load.verified", "load.read"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_while_loading_leaves_the_checkpoint_as_it_was(tmp_path, point, rank):
    run_ranks(2, save_version, tmp_path, 1, 1)
    kill_before_other_ends = point == "load.verified"
    outcomes = run_ranks(
        2, load_version, tmp_path / "step-00000001", environment={VARIABLE: f"{point}:{rank}:1"}, failures="return"
    )
    assert outcomes[rank].exitcode == -signal.SIGKILL
    other = outcomes[1 - rank]
    assert other.kind == "LostContactError" if kill_before_other_ends else other == 1.0
    assert run_ranks(2, load_version, tmp_path / "step-00000001") == [1.0, 1.0]


@pytest.mark.catalogue(5, 27)
def test_after_a_kill_while_loading_damage_is_still_passed_over(tmp_path):
    assert loads_a_whole_one("load.verified", tmp_path, load_newest)


@pytest.mark.catalogue(38)
@pytest.mark.parametrize("bug", [prune_the_newest_first, prune_in_place])
def test_control_a_planted_bug_in_pruning_is_caught(tmp_path, bug):
    assert not prunes_safely("discard.renamed", 1, tmp_path, bug)


@pytest.mark.catalogue(5, 27)
def test_control_a_planted_bug_in_loading_is_caught(tmp_path):
    assert not loads_a_whole_one("load.verified", tmp_path, load_without_checksums)


@pytest.mark.catalogue(1, 30)
@pytest.mark.parametrize(("bug", "point"), [(save_non_atomically, "discard.renamed"), (save_in_place, "save.shard")])
def test_control_a_planted_bug_in_publishing_is_caught(tmp_path, bug, point):
    assert not survives(point, 0, tmp_path, bug, step=1)


def test_a_malformed_failpoint_is_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "save.start")
    with pytest.raises(ValueError, match="expected name:rank:hit"):
        failpoint("save.start")
