"""The process that feeds trackers, with a tracker that does what a test wants."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_disk import on_a_tiny_disk
from train.small_runs import small_run

from ultrascale.config.resolve import to_toml
from ultrascale.description.sections.trackers import Log
from ultrascale.run_rows import metric_line
from ultrascale.trackers import follow
from ultrascale.trackers.follow import read_gpus
from ultrascale.trackers.tracker import TrackedRecord, plan_values

SHORT = follow.Pauses(look_seconds=0.02, first_wait_seconds=0.05)


class Fake:
    """A tracker in this process, that fails as often as it is told to."""

    failures: list[Exception]
    rows: list[int]
    endings: list[str]
    last_step: int | None = None
    hangs = False

    def __init__(self, told, known):
        self.id = known or "fresh"

    def write(self, step, seconds, values):
        if self.hangs:
            threading.Event().wait()  # also beyond a test
        if self.failures:
            raise self.failures.pop(0)
        self.rows.append(step)

    def close(self, ending):
        self.endings.append(ending)


@pytest.fixture
def fake(monkeypatch):
    Fake.failures, Fake.rows, Fake.endings = [], [], []
    Fake.last_step, Fake.hangs = None, False
    monkeypatch.setitem(sys.modules, "ultrascale.trackers.to_tensorboard", SimpleNamespace(TensorboardRun=Fake))
    return Fake


def folder_of(home: Path, *, name: str = "small") -> Path:
    folder = home / name
    folder.mkdir()
    (folder / "run.toml").write_text(to_toml(small_run(home, name=name, log=Log(sinks=("tensorboard",)))))
    return folder


def write_rows(folder: Path, steps: range, mode: str = "a") -> None:
    with open(folder / "metrics.jsonl", mode) as file:
        for step in steps:
            file.write(metric_line(step, {"time": 1.0, "train/loss": 1.0 / step, "moe/load": [[1]]}) + "\n")


def send(folder: Path, *, close_seconds: float = 20.0) -> list[str]:
    said: list[str] = []
    follow.follow(folder, said.append, lambda: True, close_seconds=close_seconds, pauses=SHORT)
    return said


def test_a_tracker_that_fails_and_answers_again_has_every_row_once_and_it_is_said_once(home, fake):
    folder = folder_of(home)
    write_rows(folder, range(1, 4))
    fake.failures = [ConnectionError("no route")] * 4
    said, over = [], threading.Event()
    thread = threading.Thread(target=lambda: follow.follow(folder, said.append, over.is_set, close_seconds=20, pauses=SHORT))
    thread.start()
    wait_for(lambda: fake.rows == [1, 2, 3])
    write_rows(folder, range(4, 6))
    over.set()
    thread.join(20)
    assert fake.rows == [1, 2, 3, 4, 5] and fake.endings == ["crash"]
    assert [line.partition(" (")[0] for line in said] == [
        "warning: tensorboard takes no rows", "tensorboard takes rows again, and has been given those it lacked",
    ]  # fmt: skip
    assert "ConnectionError: no route" in said[0] and "Training goes on" in said[0]


def test_steps_that_are_done_again_after_a_rewind_are_not_given_again(home, fake):
    folder = folder_of(home)
    write_rows(folder, range(1, 6))
    send(folder)
    (folder / "new").write_text("")
    (folder / "new").replace(folder / "metrics.jsonl")
    write_rows(folder, range(3, 9))
    (folder / "events.jsonl").write_text('{"event": "start"}\n{"event": "end"}\n')
    send(folder)
    assert fake.rows == list(range(1, 9)) and fake.endings == ["crash", "end"]


def test_a_tracker_that_hangs_is_left_after_a_while(home, fake):
    folder = folder_of(home)
    write_rows(folder, range(1, 4))
    fake.hangs = True
    started = time.monotonic()
    (told,) = send(folder, close_seconds=0.3)
    assert time.monotonic() - started < 10
    assert told.startswith("warning: tensorboard has not taken every row") and f"ultrascale.trackers {folder}` sends" in told


def test_a_run_of_an_earlier_release_goes_on_with_the_same_tracked_run_and_is_given_nothing_twice(home, fake):
    """Which counted steps from 0 in its rows and in what it had given."""
    folder = folder_of(home)
    rows = [{"step": step, "time": 1.0, "train/loss": 2.0} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {"name": "small", "trackers": {"tensorboard": {"id": "old", "step": 1}}}
    (folder / "tracked.json").write_text(json.dumps(known))
    write_rows(folder, range(4, 6))
    send(folder)
    assert fake.rows == [3, 4, 5]
    assert TrackedRecord.read(folder, "small").last_step("tensorboard", "old") == 5


@pytest.mark.parametrize("last, sent", [(2, [4, 5]), (0, [2, 3, 4, 5]), (-1, [1, 2, 3, 4, 5])])
def test_a_tracker_that_says_which_step_it_has_from_an_earlier_release_is_given_no_step_twice(home, fake, last, sent):
    """It counts that release's rows from 0, and those that it is given now from 1; also where it is asked twice in between."""
    folder = folder_of(home)
    known = {"name": "small", "trackers": {"tensorboard": {"id": "old", "step": 2}, "wandb": {"id": "w", "step": 2}}}
    (folder / "tracked.json").write_text(json.dumps(known))
    fake.last_step = last
    send(folder)
    TrackedRecord.read(folder, "small").save("wandb", "w", 3)  # of another tracker, which was given a row meanwhile
    write_rows(folder, range(1, 6))
    send(folder)
    assert fake.rows == sent
    fake.last_step = 5
    write_rows(folder, range(6, 8))
    send(folder)
    assert fake.rows == [*sent, 6, 7]


def test_a_copy_of_a_folder_under_another_name_is_another_tracked_run(home):
    folder = folder_of(home)
    TrackedRecord.read(folder, "small").save("wandb", "small-1", 7)
    again, copy = TrackedRecord.read(folder, "small"), TrackedRecord.read(folder, "copy")
    assert (again.id("wandb", None), again.last_step("wandb", "small-1")) == ("small-1", 7)
    assert (again.id("wandb", "other"), again.last_step("wandb", "other")) == ("other", 0)
    assert copy.id("wandb", None) is None and again.id("mlflow", None) is None


def test_it_ends_with_a_rank_that_is_killed_and_has_given_every_row(home):
    folder = folder_of(home)
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    code = (
        "import sys, time; from pathlib import Path; from ultrascale.train.observers.metrics import Follower\n"
        "follower = Follower(Path(sys.argv[1])); print(follower._process.pid, flush=True); time.sleep(600)"
    )
    rank = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    write_rows(folder, range(1, 5))
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    wait_for(lambda: has_ended(pid), 60)
    assert json.loads((folder / "tracked.json").read_text())["trackers"]["tensorboard"]["step"] == 4


def test_a_full_disk_costs_a_line(home):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    folder = home / "disk"
    folder.mkdir()
    told = on_a_tiny_disk(
        folder,
        f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from tiny_disk import fill
from trackers.test_follow import folder_of, write_rows
from ultrascale.train.observers import metrics as follower
follower.WAIT_SECONDS = 100.0
place = folder_of(Path({str(folder)!r}))
write_rows(place, range(1, 4))
fill(Path({str(folder)!r}))
print(follower.Follower(place).close())
""",
    )
    if told is None:
        pytest.skip("a disk cannot be mounted here")
    assert "warning: tensorboard takes no rows (OSError: [Errno 28]" in told and "Traceback" not in told


def test_the_plan_stands_beside_what_is_measured():
    plan = {"time": {"seconds_per_step": 2.0, "tokens_per_second_per_gpu": 10.0, "mfu": 0.4}}
    assert plan_values(plan) == {"plan/step_s": 2.0, "plan/tokens_per_s_per_gpu": 10.0, "plan/mfu": 0.4}
    assert plan_values({"time": None}) == plan_values({}) == {}


def test_what_nvidia_smi_tells_is_read_and_what_a_gpu_has_not_is_left_out():
    told = "0, 97, 61234, 55, 688.31, 1755\n1, 3, 4, 40, [N/A], 345\n"
    found = read_gpus(told)
    assert found["gpu0/power_w"] == 688.31 and found["gpu1/utilization_percent"] == 3.0 and "gpu1/power_w" not in found


def has_ended(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:  # not even its parent waits for it any more
        return True


def wait_for(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)
