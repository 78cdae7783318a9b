"""Signs of life are read whole, whatever the rank was doing to them at that moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
from launch.test_local import PATIENCE, launched, ranks_of, steps_logged, wait_until
from planted import fails
from tiny_disk import fill, on_a_tiny_disk
from train.small_runs import make_corpus, small_run

from ultrascale import heartbeat
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint
from ultrascale.heartbeat import FILE_BYTES, SUFFIX, HeartbeatWriter, read
from ultrascale.launch.scratch import folder_with_space
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.watch.signs_of_life import FOLDER_VARIABLE, watched

HANG_SECONDS = 50.0


def heart_in(folder: Path) -> HeartbeatWriter:
    heart = HeartbeatWriter(folder, 0, hang_seconds=HANG_SECONDS)
    heart.steps_done, heart.started_at = 7, 2
    for number in range(3):
        heart.beat(f"work {number}")
    return heart


def beat_for_ever(folder: Path) -> None:
    heart = heart_in(folder)
    while True:
        heart.beat("work " * 40)


@pytest.mark.parametrize("first, last", [(0, 4), (0, 40), (4, 70), (30, 70)])
def test_a_beat_that_is_half_written_is_passed_over_for_the_one_before(tmp_path, first, last):
    heart_in(tmp_path)
    path = tmp_path / f"0{SUFFIX}"
    (whole,) = read(tmp_path)
    assert whole.doing == "work 2" and whole.beats == 4
    data = bytearray(path.read_bytes())
    data[first:last] = bytes(last - first)  # the fourth beat is in the first slot
    path.write_bytes(data)
    (before,) = read(tmp_path)
    assert (before.doing, before.beats, before.steps_done) == ("work 1", 3, 7)
    assert before.overdue < -HANG_SECONDS / 2 and before.pid == whole.pid


def test_a_file_without_a_whole_beat_says_nothing(tmp_path):
    heart_in(tmp_path)
    (tmp_path / f"0{SUFFIX}").write_bytes(bytes(FILE_BYTES))
    assert read(tmp_path) == []


def test_nobody_who_looks_while_a_rank_writes_sees_anything_torn(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=beat_for_ever, args=(tmp_path,), daemon=True)
    process.start()
    while not any(beat.doing.startswith("work ") for beat in read(tmp_path)):  # its first beat says that it starts
        time.sleep(0.01)
    try:
        seen = [beat for _ in range(4000) for beat in read(tmp_path)]
        while len({beat.beats for beat in seen}) <= 100:  # where other work leaves the writer little of the processor
            seen += read(tmp_path)
    finally:
        process.kill()
        process.join()
    assert all(beat.overdue < 0 and beat.pid == process.pid and beat.doing.startswith("work ") for beat in seen)


def beat_on_a_full_disk(folder: Path, sparse: bool) -> None:
    """As a rank whose place for signs of life fills once it has started, and as one that finds it full."""
    if sparse:
        heartbeat.allocate = lambda file: file.truncate(FILE_BYTES)
    early = HeartbeatWriter(folder, 0, hang_seconds=HANG_SECONDS)
    fill(folder)
    for number in range(heartbeat.RING + 1):
        early.note_collective("all", f"sum {number}")
    early.beat("at work")
    with watched(small_run(folder), Ranks(1, 2, torch.device("cpu"))), heartbeat.waits("a sum", collective=("all", "a sum")):
        print(json.dumps([beat.doing for beat in read(folder)]))


def fill_under_beats(folder: Path, *, sparse: bool = False) -> None:
    call = f"from launch.test_heartbeat import *; beat_on_a_full_disk(Path({str(folder)!r}), {sparse})"
    if (told := on_a_tiny_disk(folder, call)) is None:
        pytest.skip("no file system may be mounted here")
    assert json.loads(told) == ["at work"]


@pytest.mark.catalogue(33)
def test_a_place_for_signs_of_life_that_is_full_ends_no_rank(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    fill_under_beats(tmp_path)


@pytest.mark.catalogue(33)
def test_control_signs_of_life_without_room_of_their_own_end_a_rank_by_sigbus(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    fails(fill_under_beats, tmp_path, sparse=True, told="exit code -7|exit code 135")


def meet_on_a_full_disk(folder: Path) -> None:
    tempfile.tempdir = str(folder)
    places = [str(folder_with_space("x-", 2)).startswith(str(folder))]
    fill(folder)
    places.append(str(found := folder_with_space("x-", 2)).startswith(str(folder)))
    found.rmdir()
    print(json.dumps([places, sorted(name[:2] for name in os.listdir(folder))]))


@pytest.mark.catalogue(33)
def test_ranks_meet_elsewhere_where_the_usual_temporary_folder_is_full(tmp_path):
    call = f"from launch.test_heartbeat import *; meet_on_a_full_disk(Path({str(tmp_path)!r}))"
    if (told := on_a_tiny_disk(tmp_path, call)) is None:
        pytest.skip("no file system may be mounted here")
    assert json.loads(told) == [[True, False], ["fi", "x-"]]


def test_where_no_place_has_room_that_is_an_error_which_names_the_usual_one(tmp_path, temporary_folder, monkeypatch):
    temporary_folder(tmp_path / "gone")
    monkeypatch.setattr("ultrascale.launch.scratch.MEMORY", tmp_path / "none")
    with pytest.raises(OSError, match="gone"):
        folder_with_space("x-", 2)


def kill_on_a_full_disk(folder: Path) -> None:
    """Train on two ranks whose temporary files are on this disk, fill it, and kill one of them; prints what was said."""
    home = Path(os.environ["HOME"])
    run = small_run(
        home, steps=200, layout=Layout(dp=2, micro_batch_size=2), checkpoint=Checkpoint(every_steps=10, export=False)
    )
    with launched(run) as process:
        wait_until(lambda: steps_logged(run) >= 12, process)
        fill(folder)
        ranks_of(process)[1].kill()
        told = process.communicate(timeout=PATIENCE)[0]
    print(json.dumps([process.returncode, told]))


@pytest.mark.nightly
@pytest.mark.catalogue(33)
def test_a_command_starts_its_ranks_again_although_its_temporary_folder_is_full(tmp_path, monkeypatch):
    (small := tmp_path / "tmp").mkdir()  # where `launched` has a command's temporary files
    make_corpus(tmp_path / "tokens")
    monkeypatch.setenv("HOME", str(tmp_path))
    call = f"from launch.test_heartbeat import *; kill_on_a_full_disk(Path({str(small)!r}))"
    if (told := on_a_tiny_disk(small, call, seconds=2 * PATIENCE)) is None:
        pytest.skip("no file system may be mounted here")
    code, said = json.loads(told.splitlines()[-1])
    assert code == 0 and f"{small} cannot be written (No space left on device): the ranks meet in /dev/shm" in said, said
