"""Disks that are full, fail, or are slow: all ranks are told the same, nothing half-done is found, and what may pass is waited
out."""

import errno
import json
import os
import re
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.disk_model import recorded
from planted import fails
from ranks import run_ranks
from tiny_disk import on_a_tiny_disk

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError, Saver, saver
from ultrascale.checkpoint.disk import files, patience
from ultrascale.checkpoint.disk.folders import make_folder
from ultrascale.checkpoint.saving import SavePlan
from ultrascale.failpoints import VARIABLE


def state(value: float) -> dict[str, torch.Tensor]:
    """64 KiB on every rank, which all hold copies."""
    return {f"w{i}": torch.full((32, 128), float(value)) for i in range(4)}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def value_of(folder: Path | None) -> float | None:
    if folder is None:
        return None
    values = {number for tensor in checkpoint.load_full(folder)[0].values() for number in tensor.flatten().tolist()}
    assert len(values) == 1, values
    return values.pop()


# --- full ------------------------------------------------------------------------------------------------------------------


def fill_the_disk(root: str, careless: bool) -> None:
    """Save until the disk is full; prints what was told, what is left there, and what loads. Runs where `root` is small."""
    outcomes = run_ranks(2, save_until_full, Path(root), careless)
    found = None if careless else value_of(checkpoint.newest_valid(Path(root)))
    print(json.dumps({"outcomes": outcomes, "left": names(Path(root)), "found": found}))


def save_until_full(rank: int, root: Path, careless: bool) -> list[str]:
    if careless:  # the planted bug: a short write is taken for a whole one, and nobody looks afterwards
        files._write_blocks = lambda fd, data, crc=0: write_what_fits(fd, data) or crc
        os.fsync = lambda fd: None
        checkpoint.saving.verify_size = lambda *place: None  # pyright: ignore[reportAttributeAccessIssue]
    told = []
    with Saver(root, keep=0) as saving:
        for step in range(1, 8):
            try:
                saving.save(step, state(step), {})
            except CheckpointError as error:
                told.append(f"{step}: {error}")
    return told


def write_what_fits(fd: int, data: memoryview) -> None:
    with suppress(OSError):
        os.write(fd, data)


def on_a_full_disk(folder: Path, careless: bool) -> dict | None:
    """`fill_the_disk` on a small one; None where that may not be mounted."""
    told = on_a_tiny_disk(
        folder, f"from checkpoint.test_disks import fill_the_disk; fill_the_disk({str(folder)!r}, {careless})"
    )
    return None if told is None else json.loads(told.splitlines()[-1])


def on_a_disk_full_by_limit(folder: Path) -> dict:
    """The same where nothing may be mounted: no file may be longer than 4 kB on rank 1 from step 4 on."""

    outcomes = run_ranks(2, save_past_a_limit, folder)
    return {"outcomes": outcomes, "left": names(folder), "found": value_of(checkpoint.newest_valid(folder))}


def save_past_a_limit(rank: int, root: Path) -> list[str]:
    told = []
    with Saver(root, keep=0) as saving:
        for step in range(1, 8):
            if step == 4 and rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            try:
                saving.save(step, state(step), {})
            except CheckpointError as error:
                told.append(f"{step}: {error}")
    return told


@pytest.mark.catalogue(25)
def test_on_a_full_disk_every_save_fails_on_all_ranks_and_the_last_good_one_loads(tmp_path):
    told = on_a_full_disk(tmp_path, careless=False) or on_a_disk_full_by_limit(tmp_path)
    first, second = told["outcomes"]
    assert first == second and [line.partition(":")[0] for line in first] == ["4", "5", "6", "7"]
    assert all(" of 2: OSError: [Errno" in line and "Free space or choose another folder" in line for line in first)
    assert told["left"] == ["step-00000001", "step-00000002", "step-00000003"], "an unfinished save was left on a full disk"
    assert told["found"] == 3.0


@pytest.mark.catalogue(25)
def test_control_a_short_write_taken_for_a_whole_one_is_seen(tmp_path):
    told = on_a_full_disk(tmp_path, careless=True)
    # Where nothing may be mounted, a limit on the length of files stops the same write.
    assert told is None or [line.partition(":")[0] for line in told["outcomes"][0]] != ["4", "5", "6", "7"]


# --- failing ---------------------------------------------------------------------------------------------------------------


class Flaky:
    """`os.<name>` that fails `times` times with `error`, beginning with call `first` (from zero) under `root`."""

    def __init__(self, name: str, error: int, *, first: int = 0, times: int = 1):
        self.real, self.name, self.error = getattr(os, name), name, error
        self.left, self.skip, self.failed = times, first, 0

    def __call__(self, *arguments, **options):
        if self.skip:
            self.skip -= 1
        elif self.left:
            self.left, self.failed = self.left - 1, self.failed + 1
            raise OSError(self.error, os.strerror(self.error))
        return self.real(*arguments, **options)


def save_on_a_flaky_disk(rank: int, root: Path, name: str, error: int, times: int, bad_rank: int) -> tuple[int, str | None]:
    """How often the disk failed on this rank, and what it was told. Step 1 is saved before the disk goes bad."""
    patience.PAUSES_SECONDS = (0.0, 0.0)
    with Saver(root, keep=0) as saving:
        saving.save(1, state(1), {})
        flaky = Flaky(name, error, times=times if rank == bad_rank else 0)
        setattr(os, name, flaky)
        try:
            saving.save(2, state(2), {})
            told = None
        except CheckpointError as failed:
            told = str(failed)
        finally:
            setattr(os, name, flaky.real)
    return flaky.failed, told


@pytest.mark.catalogue(33)
@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EINTR])
@pytest.mark.parametrize(("name", "bad_rank"), [("write", 1), ("fsync", 1), ("rename", 0), ("open", 1)])
def test_an_error_that_passes_is_gone_over_and_the_checkpoint_is_whole(tmp_path, name, bad_rank, error):
    outcomes = run_ranks(2, save_on_a_flaky_disk, tmp_path, name, error, 1, bad_rank)
    assert outcomes[bad_rank] == (1, None) and outcomes[1 - bad_rank] == (0, None)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert value_of(checkpoint.newest_valid(tmp_path)) == 2.0


@pytest.mark.catalogue(33)
@pytest.mark.parametrize(("name", "bad_rank"), [("write", 1), ("fsync", 1), ("rename", 0)])
def test_an_error_that_stays_is_told_on_every_rank_and_nothing_is_published(tmp_path, name, bad_rank):
    outcomes = run_ranks(2, save_on_a_flaky_disk, tmp_path, name, errno.EIO, 99, bad_rank)
    assert outcomes[0][1] == outcomes[1][1] and outcomes[bad_rank][0] == 3
    assert f"rank {bad_rank} of 2: OSError: [Errno 5] Input/output error" in outcomes[0][1]
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.catalogue(33)
def test_a_disk_that_is_full_or_forbidden_is_not_asked_again(tmp_path):
    for error in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        root = tmp_path / str(error)
        assert run_ranks(2, save_on_a_flaky_disk, root, "write", error, 99, 1)[1][0] == 1


@pytest.fixture
def call_is(monkeypatch) -> Callable[[str, Callable[..., Any]], None]:
    """Puts something in the place of a call to the system, over what is there; nothing is waited for between two attempts."""
    monkeypatch.setattr(patience, "PAUSES_SECONDS", (0.0, 0.0))
    return lambda name, call: monkeypatch.setattr(os, name, call)


@pytest.mark.catalogue(33)
def test_an_error_that_passes_while_reading_makes_no_checkpoint_look_damaged(tmp_path, call_is):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, state(step), {})
    for call in range(4):  # the manifest, the shard while it is verified, the shard again, ...
        flaky = Flaky("preadv", errno.EIO, first=call)
        call_is("preadv", flaky)
        assert (value_of(checkpoint.newest_valid(tmp_path)), flaky.failed) == (2.0, 1)
    call_is("preadv", Flaky("preadv", errno.EIO, times=99))
    with pytest.raises(CheckpointError, match=r"manifest\.json: .*Input/output error"):
        checkpoint.load(tmp_path / "step-00000002", state(0))


def test_a_rename_that_was_carried_out_although_it_failed_is_done_once(tmp_path, call_is):
    real, lost = os.rename, []

    def lose_the_first_answer(source, target):
        real(source, target)
        if not lost:
            lost.append(target)
            raise OSError(errno.EIO, "the answer was lost")

    checkpoint.save(tmp_path, 1, state(1), {})
    call_is("rename", lose_the_first_answer)
    checkpoint.save(tmp_path, 2, state(2), {})
    assert len(lost) == 1
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# --- slow ------------------------------------------------------------------------------------------------------------------


LATE_SECONDS, MOST_SECONDS = 0.3, 10.0
"""How long after training has looked the disk is done with a save, and how long it waits for that."""


def train_over_a_slow_disk(rank: int, root: Path) -> list[bool]:
    """Three saves over a disk that is not done with one before training has looked, beside collectives of training; whether
    each checkpoint was there when `save` returned."""
    write, written, looked = saver.write_and_publish, [], threading.Semaphore(0)

    def slowly(plan, *, ranks):
        looked.acquire(timeout=MOST_SECONDS)
        written.append(write(plan, ranks=ranks))
        return written[-1]

    saver.write_and_publish = slowly
    there, total = [], torch.zeros(1)
    with Saver(root, keep=0, asynchronous=True) as saving:
        try:
            for step in (1, 2, 3):
                there.append(saving.save(step, state(step), {}).exists())
                assert len(written) >= step - 1, "two saves are pending, and what they hold fills the host's memory"
                threading.Timer(LATE_SECONDS, looked.release).start()
                for _ in range(20):
                    dist.all_reduce(total)
        finally:
            looked.release(3)
    return there


@pytest.mark.catalogue(32)
def test_over_a_slow_disk_training_goes_on_and_one_save_is_written_at_a_time(tmp_path):
    assert run_ranks(2, train_over_a_slow_disk, tmp_path) == [[False] * 3] * 2
    assert [value_of(tmp_path / f"step-0000000{step}") for step in (1, 2, 3)] == [1.0, 2.0, 3.0]


# --- killed, or told to end, while a save is pending ------------------------------------------------------------------------


def save_in_background(rank: int, root: Path, saver: type[Saver] = Saver) -> None:
    with saver(root, asynchronous=True) as saving:
        saving.save(2, state(2), {})


@pytest.mark.catalogue(36)
def test_the_end_waits_for_a_save_in_the_background(tmp_path, saver=Saver):
    run_ranks(2, save_in_background, tmp_path, saver)
    assert value_of(checkpoint.newest_valid(tmp_path)) == 2.0


@pytest.mark.catalogue(1, 36)
@pytest.mark.parametrize(
    ("point", "rank", "found"), [("save.shard", 1, 1.0), ("save.manifest", 0, 1.0), ("publish.renamed", 0, 2.0)]
)
def test_a_kill_while_a_save_is_pending_leaves_the_old_or_the_new_one(tmp_path, point, rank, found):
    checkpoint.save(tmp_path, 1, state(1), {})
    outcomes = run_ranks(2, save_in_background, tmp_path, environment={VARIABLE: f"{point}:{rank}:1"}, failures="return")
    assert outcomes[rank].kind == "died"
    assert value_of(checkpoint.newest_valid(tmp_path)) == found


class EndsAtOnce(Saver):
    """The bug: the end does not wait, and a save, which is small here, is not done before it."""

    closed = threading.Event()

    def close(self) -> None:
        self._resources.close()
        self.closed.set()

    def _write(self, plan: SavePlan) -> Path:
        assert self.closed.wait(60)
        return super()._write(plan)


@pytest.mark.catalogue(36)
def test_control_an_end_that_does_not_wait_loses_the_save(tmp_path):
    fails(test_the_end_waits_for_a_save_in_the_background, tmp_path, EndsAtOnce)


# --- what must not be saved -------------------------------------------------------------------------------------------------


def save_poisoned(rank: int, root: Path, number: float, asynchronous: bool) -> str:
    with Saver(root, keep=1, asynchronous=asynchronous) as saving:
        saving.save(1, state(1), {}, finite=True)
        bad = state(2) | {"count": torch.tensor(7)}
        if rank == 1:
            bad["w3"][31, 127] = number
        with pytest.raises(CheckpointError) as caught:
            saving.save(2, bad, {}, finite=True)
    return str(caught.value)


@pytest.mark.catalogue(39)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_state_that_is_not_finite_on_one_rank_is_saved_by_none_and_pushes_nothing_out(tmp_path, number, asynchronous):
    first, second = run_ranks(2, save_poisoned, tmp_path, number, asynchronous)
    assert first == second and "rank 1 of 2: w3: NaN or infinite. Nothing was saved" in first
    assert names(tmp_path) == ["step-00000001"] and value_of(tmp_path / "step-00000001") == 1.0


@pytest.mark.catalogue(39)
def test_control_without_the_check_a_nan_takes_the_place_of_the_last_good_one(tmp_path):
    with Saver(tmp_path, keep=1) as saving:
        saving.save(1, state(1), {})
        saving.save(2, state(float("nan")), {})
    assert names(tmp_path) == ["step-00000002"]


# --- names -------------------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_made_is_made_durable_with_all_above_it(tmp_path):
    with recorded(tmp_path) as recorder:
        make_folder(tmp_path / "a" / "b" / "c")
        make_folder(tmp_path / "a" / "b" / "c")
        above = [recorder.inode(str(folder)) for folder in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")]
    assert [one.inode for one in recorder.operations if one.kind == "fsync"] == above


def test_a_full_disk_is_told_without_a_file_that_has_no_name(tmp_path):
    code = f"""
from pathlib import Path
from tiny_disk import fill
from ultrascale import checkpoint
folder = Path({str(tmp_path)!r})
fill(folder)
try:
    checkpoint.check_writable(folder)
except checkpoint.CheckpointError as error:
    print(error)
"""
    told = on_a_tiny_disk(tmp_path, code)
    if told is None:
        pytest.skip("no file system can be mounted here")
    assert re.search(r"cannot be written here \(No space left on device(: .+)?\)\. Choose", told) and "None" not in told, told
