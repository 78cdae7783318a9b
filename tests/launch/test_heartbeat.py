"""Signs of life are read whole, whatever the rank was doing to them at that moment."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from ultrascale.heartbeat import FILE_BYTES, SUFFIX, Heart, read

HANG_SECONDS = 50.0


def heart_in(folder: Path) -> Heart:
    heart = Heart(folder, 0, hang_seconds=HANG_SECONDS)
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
    while not read(tmp_path):
        time.sleep(0.01)
    try:
        seen = [beat for _ in range(4000) for beat in read(tmp_path)]
        while len({beat.beats for beat in seen}) <= 100:  # where other work leaves the writer little of the processor
            seen += read(tmp_path)
    finally:
        process.kill()
        process.join()
    assert all(beat.overdue < 0 and beat.pid == process.pid and beat.doing.startswith("work ") for beat in seen)
