"""Saving during a run: in the background, under a full disk, and with old checkpoints cleared away."""

import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from planted import fails, nobody_holds_the_folder
from ranks import run_ranks

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError, LostContactError, Saver, saver
from ultrascale.checkpoint.disk import files


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def steps(root: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(root)]


def value_at(root: Path, step: int) -> float:
    tensors, _ = checkpoint.load_full(root / f"step-{step:08d}")
    assert len(set(tensors["w"].flatten().tolist())) == 1
    return tensors["w"][0, 0].item()


# --- a full disk -----------------------------------------------------------------------------------------------------------


def save_past_a_file_size_limit(rank: int, root: Path, asynchronous: bool) -> tuple[list[str], float]:
    """Rank 1 cannot write more than 4 kB into a file; what each rank is told, and how long it takes."""
    told, start = [], time.monotonic()
    with Saver(root, asynchronous=asynchronous) as saving:
        small, large = ({"w": torch.ones(n, 64), "v": torch.ones(n, 64)} for n in (2, 64))
        saving.save(1, small, {})
        saving.wait()
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as caught:
            saving.save(2, large, {})
            saving.wait()
        told.append(str(caught.value))
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        saving.save(3, large, {})
    return told, time.monotonic() - start


@pytest.mark.catalogue(25)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_full_on_one_rank_fails_the_save_on_all_and_publishes_nothing(tmp_path, asynchronous):
    (first, seconds), (second, _) = run_ranks(2, save_past_a_file_size_limit, tmp_path, asynchronous)
    assert first == second
    assert "saving step 2" in first[0]
    assert "rank 1 of 2: OSError: [Errno 27] File too large" in first[0]
    assert "Free space" in first[0]
    assert steps(tmp_path) == [1, 3]
    assert seconds < 100, "the other rank has waited for a time-out"


def remove(root: Path) -> None:
    shutil.rmtree(root)


def move(root: Path) -> None:
    root.rename(root.with_name("moved"))


def put_a_file_in_its_place(root: Path) -> None:
    move(root)
    root.write_text("in the way")


def put_a_folder_in_its_place(root: Path) -> None:
    remove(root)
    root.mkdir()


def put_a_link_in_its_place(root: Path) -> None:
    move(root)
    root.with_name("another").mkdir()
    root.symlink_to(root.with_name("another"))


def lose_the_folder(rank: int, root: Path, lose: Callable[[Path], None], options: dict) -> str:
    with Saver(root, **options) as saving:
        for step in (1, 2):
            saving.save(step, {"w": torch.ones(2, 2)}, {})
        saving.wait()
        dist.barrier()
        if rank == 0:
            lose(root)
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            saving.save(3, {"w": torch.ones(2, 2)}, {})
            saving.wait()
        return str(caught.value)


@pytest.mark.catalogue(34)
@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (remove, "was removed since checkpoints were first saved there"),
        (move, "was moved to {place} since"),
        (put_a_file_in_its_place, "was moved to {place}, and something else is in its place since"),
        (put_a_folder_in_its_place, "was removed, and something else is in its place since"),
        (put_a_link_in_its_place, "was moved to {place}, and something else is in its place since"),
    ],
)
@pytest.mark.parametrize("options", [{"keep": 1}, {"asynchronous": True}], ids=["foreground", "background"])
def test_a_folder_lost_during_the_run_is_an_error_on_every_rank_and_nothing_is_written_where_it_was(
    tmp_path, lose, told, options
):
    root = tmp_path / "checkpoints"
    for text in run_ranks(2, lose_the_folder, root, lose, options):
        assert f"rank 0 of 2: {root} {told.format(place=root.with_name('moved'))}" in text
    assert not root.is_dir() or names(root) == []


@pytest.mark.catalogue(34)
def test_control_a_folder_that_nobody_holds_is_made_anew_and_its_loss_never_told(tmp_path, monkeypatch):
    nobody_holds_the_folder(monkeypatch)
    test = test_a_folder_lost_during_the_run_is_an_error_on_every_rank_and_nothing_is_written_where_it_was
    fails(test, tmp_path, remove, "was removed", {}, told="DID NOT RAISE")


@pytest.mark.catalogue(34)
def test_after_the_loss_of_its_folder_a_saver_goes_on_where_it_is_told_to(tmp_path):
    with Saver(tmp_path / "checkpoints") as saving:
        remove(tmp_path / "checkpoints")
        saving.use(tmp_path / "other")
        saving.save(1, {"w": torch.ones(2, 2)}, {})
    assert steps(tmp_path / "other") == [1]


@pytest.mark.catalogue(34)
@pytest.mark.parametrize("place", ["/proc/nowhere", "{file}/below"])
def test_a_place_that_cannot_be_written_is_told_before_the_first_save(tmp_path, place):
    (tmp_path / "file").write_text("")
    root = Path(place.format(file=tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written here .*Choose a writable folder"):
        checkpoint.check_writable(root)
    with pytest.raises(CheckpointError, match="before the first save"):
        Saver(root)


@pytest.mark.catalogue(34)
def test_control_a_place_that_nobody_tries_at_the_start_is_told_of_at_the_first_save(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "check_writable", lambda root: None)
    nobody_holds_the_folder(monkeypatch)
    fails(test_a_place_that_cannot_be_written_is_told_before_the_first_save, tmp_path, "{file}/below", told="DID NOT RAISE")


def test_a_full_disk_is_told_without_a_file_that_has_no_name(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_blocks", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be written here \(No space left on device\)\. Choose"):
        checkpoint.check_writable(tmp_path)


def test_the_write_test_leaves_nothing(tmp_path):
    checkpoint.check_writable(tmp_path / "new" / "folder")
    assert names(tmp_path / "new" / "folder") == []


# --- in the background -----------------------------------------------------------------------------------------------------


def change_while_saving(rank: int, root: Path) -> None:
    weights = torch.full((64, 256), 1.0)
    write, looked = saver.write_and_publish, threading.Event()

    def write_late(plan, *, ranks):
        looked.wait(60)
        return write(plan, ranks=ranks)

    saver.write_and_publish = write_late
    with Saver(root, asynchronous=True) as saving:
        folder = saving.save(1, {"w": weights}, {})
        weights.fill_(2.0)
        assert not folder.exists(), "save waited for the disk"
        threading.Timer(0.3, looked.set).start()
        total = torch.ones(1)
        dist.all_reduce(total)  # Training's own collectives go on beside those of the save.
        saving.save(2, {"w": weights}, {})
        assert folder.exists(), "two saves are pending"
        weights.fill_(3.0)


@pytest.mark.catalogue(37)
def test_a_save_in_the_background_keeps_the_numbers_of_its_step(tmp_path):
    run_ranks(2, change_while_saving, tmp_path)
    assert [value_at(tmp_path, step) for step in (1, 2)] == [1.0, 2.0]


@pytest.mark.catalogue(37)
def test_control_without_a_copy_a_save_in_the_background_has_later_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "copy_to_host", lambda plan: plan)
    fails(test_a_save_in_the_background_keeps_the_numbers_of_its_step, tmp_path)


def fail_in_background(rank: int, root: Path, then: str) -> str:
    saving = Saver(root, asynchronous=True)
    write = saver.write_and_publish

    def fail_on_rank_1(plan, *, ranks):
        def work() -> None:
            if ranks.rank == 1:
                raise OSError(5, "Input/output error")

        ranks.agree("saving", work)

    saver.write_and_publish = fail_on_rank_1
    saving.save(1, {"w": torch.ones(2, 2)}, {})
    saver.write_and_publish = write
    with pytest.raises(CheckpointError) as caught:
        {
            "save": lambda: saving.save(2, {"w": torch.ones(2, 2)}, {}),
            "wait": saving.wait,
            "close": saving.close,
        }[then]()
    if then != "close":
        saving.save(3, {"w": torch.ones(2, 2)}, {})  # Told once; the next save is a new chance.
        saving.close()
    return str(caught.value)


@pytest.mark.catalogue(36)
@pytest.mark.parametrize("then", ["save", "wait", "close"])
def test_what_fails_in_the_background_is_raised_on_every_rank(tmp_path, then):
    for text in run_ranks(2, fail_in_background, tmp_path, then):
        assert text == "saving: rank 1 of 2: OSError: [Errno 5] Input/output error."
    assert steps(tmp_path) == ([] if then == "close" else [3])


@pytest.mark.catalogue(36)
@pytest.mark.parametrize("then", ["save", "close"])
def test_control_a_failure_that_stays_in_its_thread_is_missed(tmp_path, monkeypatch, then):
    """As torch.distributed.checkpoint has it (pytorch#191391)."""

    def wait_only(saving: Saver) -> None:
        if saving._pending is not None:
            saving._pending.exception()

    monkeypatch.setattr(Saver, "wait", wait_only)
    fails(test_what_fails_in_the_background_is_raised_on_every_rank, tmp_path, then, told="DID NOT RAISE")


# --- keeping some ----------------------------------------------------------------------------------------------------------


def save_many(rank: int, root: Path, last: int, options: dict) -> None:
    with Saver(root, **options) as saving:
        for step in range(1, last + 1):
            saving.save(step, {"w": torch.full((2, 2), float(step))}, {})


@pytest.mark.catalogue(38)
@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"keep": 2}, [6, 7]),
        ({"keep": 1}, [7]),
        ({"keep": 0}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": 2, "keep_every_steps": 3}, [3, 6, 7]),
        ({"keep": 2, "asynchronous": True}, [6, 7]),
    ],
)
def test_the_newest_and_every_nth_stay(tmp_path, options, left):
    run_ranks(2, save_many, tmp_path, 7, options)
    assert steps(tmp_path) == left


@pytest.mark.catalogue(38)
def test_damaged_ones_do_not_count_among_those_kept(tmp_path):
    save_many(0, tmp_path, 3, {"keep": 0})
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    with Saver(tmp_path, keep=2) as saving:
        saving.save(4, {"w": torch.ones(2, 2)}, {})
    assert steps(tmp_path) == [2, 3, 4]


def flip_a_bit(folder: Path) -> None:
    """The file's size stays."""
    shard = folder / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def go_on_after_damage(rank: int, root: Path) -> list[list[int]]:
    left = []
    with Saver(root, keep=2) as saving:
        for step in (12, 13, 14):
            saving.save(step, {"w": torch.ones(2, 2)}, {})
            left.append(steps(root) if rank == 0 else [])
            dist.barrier()
    return left


@pytest.mark.catalogue(38)
def test_a_checkpoint_with_changed_bytes_takes_the_place_of_no_good_one(tmp_path):
    for step in (10, 11):
        checkpoint.save(tmp_path, step, {"w": torch.ones(2, 2)}, {})
    flip_a_bit(tmp_path / "step-00000011")
    after, _ = run_ranks(2, go_on_after_damage, tmp_path)
    assert after == [[10, 11, 12], [12, 13], [13, 14]]  # 11 goes with the last good one before it, 10


@pytest.fixture
def read_back(monkeypatch) -> list[str]:
    """Names of the checkpoints that savers verify."""
    read, verify = [], saver.verify
    monkeypatch.setattr(saver, "verify", lambda folder, **how: read.append(folder.name) or verify(folder, **how))
    return read


def test_each_checkpoint_is_read_back_once_before_it_counts(tmp_path, read_back):
    save_many(0, tmp_path, 5, {"keep": 2})
    assert read_back == [f"step-{step:08d}" for step in (3, 2, 4, 5)]


def test_a_step_saved_again_is_read_back_again(tmp_path, read_back):
    with Saver(tmp_path, keep=1) as saving:
        for step in (1, 2):
            saving.save(step, {"w": torch.ones(2, 2)}, {})
        (tmp_path / "step-00000000").mkdir()  # something to remove, so that the newest is looked at
        read_back.clear()
        saving.save(2, {"w": torch.zeros(2, 2)}, {})
    assert read_back == ["step-00000002"]


@pytest.mark.catalogue(38)
def test_nothing_is_removed_when_the_new_one_does_not_verify(tmp_path, monkeypatch):
    save_many(0, tmp_path, 2, {"keep": 0})
    write = saver.write_and_publish

    def write_and_damage(plan, *, ranks):
        folder = write(plan, ranks=ranks)
        os.truncate(folder / "rank-00000.safetensors", 100)
        return folder

    monkeypatch.setattr(saver, "write_and_publish", write_and_damage)
    with Saver(tmp_path, keep=1) as saving, pytest.raises(CheckpointError, match=r"step-00000003/rank-00000\.safetensors"):
        saving.save(3, {"w": torch.ones(2, 2)}, {})
    assert steps(tmp_path) == [1, 2, 3]
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-00000002"


def test_later_steps_of_an_abandoned_future_do_not_push_the_new_one_out(tmp_path):
    save_many(0, tmp_path, 5, {"keep": 0})
    with Saver(tmp_path, keep=1) as saving:
        saving.save(2, {"w": torch.ones(2, 2)}, {})
    assert steps(tmp_path) == [2, 3, 4, 5]


def test_leftovers_of_a_killed_run_are_swept_and_other_files_are_not(tmp_path):
    (tmp_path / ".step-00000003.tmp-0123abcd").mkdir()
    (tmp_path / ".step-00000003.tmp-0123abcd" / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".step-00000001.del-0123abcd").mkdir()
    (tmp_path / ".step-notes.txt").write_text("mine")
    with Saver(tmp_path) as saving:
        assert saving.swept == [".step-00000001.del-0123abcd", ".step-00000003.tmp-0123abcd"]
    assert names(tmp_path) == [".step-notes.txt"]


@pytest.mark.parametrize("options", [{"keep": -1}, {"keep_every_steps": 0}])
def test_impossible_retention_is_refused(tmp_path, options):
    with pytest.raises(CheckpointError, match="expected keep >= 0 and a positive interval"):
        Saver(tmp_path, **options)


# --- a rank that ends ------------------------------------------------------------------------------------------------------


def end_during(rank: int, root: Path, doing: str) -> str:
    """What rank 0 is told when rank 1 ends instead of saving or searching."""
    with Saver(root) as saving:
        saving.save(1, {"w": torch.ones(2, 2)}, {})
        if rank == 1:
            os._exit(1)
        with pytest.raises(LostContactError) as caught:
            saving.save(2, {"w": torch.ones(2, 2)}, {}) if doing == "saving" else checkpoint.search(root)
        Path(root, "told").write_text(str(caught.value))
        os._exit(0)


@pytest.mark.parametrize("doing", ["saving", "searching"])
def test_a_rank_that_ends_is_named_and_its_checkpoints_are_not_taken_for_damaged(tmp_path, doing):
    run_ranks(2, end_during, tmp_path, doing, failures="return")
    told = (tmp_path / "told").read_text()
    assert told.startswith("rank 0 lost contact with rank 1 while saving or loading a checkpoint: it has ended. Look for")
    assert checkpoint.newest_valid(tmp_path) == tmp_path / "step-00000001"
