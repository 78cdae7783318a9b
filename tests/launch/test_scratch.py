"""Temporary folders of killed processes are swept away; those of living ones, of others and of nobody known are not."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ultrascale.launch.scratch import OWNER, SEMAPHORES, scratch_folder, sweep

FORK: Any = multiprocessing.get_context("fork")
LAUNCHER = """
import multiprocessing, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background has it ignored
from ultrascale.launch.scratch import launcher_scratch
print(launcher_scratch(), flush=True)
lock = multiprocessing.get_context("spawn").Lock()
print(multiprocessing.util.get_temp_dir(), flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory, temporary_folder) -> Path:
    """With a short name: the path of a socket may have a hundred characters."""
    folder = tmp_path_factory.mktemp("t")
    temporary_folder(folder)
    return folder


@pytest.fixture
def living() -> Iterator[tuple[Any, Path]]:
    """A process with a folder, and the folder."""

    def live(told: Any) -> None:
        with scratch_folder("ranks") as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").touch()
            told.send(folder)
            signal.pause()

    receiving, sending = FORK.Pipe(duplex=False)
    process = FORK.Process(target=live, args=(sending,))
    process.start()
    yield process, receiving.recv()
    process.kill()
    process.join()


def kill(process: Any) -> None:
    process.kill()
    process.join()


def test_the_folder_of_a_killed_process_is_gone_when_the_next_one_is_made(living):
    process, folder = living
    kill(process)
    with scratch_folder("proof") as other:
        assert not folder.exists() and other.is_dir()
    assert not other.exists()


def test_a_folder_stays_that_another_process_sweeps_over_while_it_is_made(monkeypatch):
    take, swept = fcntl.flock, []

    def take_after_a_sweep(file, operation) -> None:
        if not swept:
            swept.append(file)
            sweep()
        take(file, operation)

    monkeypatch.setattr(fcntl, "flock", take_after_a_sweep)
    with scratch_folder("ranks") as folder:
        assert swept
        (folder / "0.crash").touch()
        sweep()
        assert (folder / "0.crash").exists()


def test_the_folder_of_a_living_process_stays(living):
    sweep()
    assert (living[1] / "deep" / "file").exists()


def test_a_folder_in_which_ranks_of_a_killed_launcher_are_still_leaving_stays(living):
    process, folder = living
    kill(process)
    with open(folder / "deep" / "ranks.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        sweep()
        assert folder.exists()
    sweep()
    assert not folder.exists()


def test_what_has_no_owner_is_a_link_or_is_another_users_stays(living, temporary, monkeypatch):
    process, folder = living
    kill(process)
    (temporary / "ultrascale-signs-x").mkdir()
    (temporary / "ultrascale-link").symlink_to(temporary / "elsewhere")
    (temporary / "elsewhere").mkdir()
    (temporary / "elsewhere" / OWNER).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        sweep()
    assert folder.exists()
    sweep()
    assert sorted(path.name for path in temporary.iterdir()) == ["elsewhere", "ultrascale-link", "ultrascale-signs-x"]


@pytest.mark.skipif(not SEMAPHORES.is_dir(), reason="semaphores are not to be seen here")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed with its resource tracker", "ends in order"])
def test_semaphores_and_sockets_of_a_launcher_are_its_own_and_go_with_its_folder(temporary, how):
    """Python gives them names that tell nobody whose they are, and nobody removes them once its tracker is killed as well."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"TMPDIR": str(temporary)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    folder, sockets = (Path(process.stdout.readline().strip()) for _ in range(2))
    made = len([*SEMAPHORES.glob(f"sem.{folder.name}-*")])
    os.killpg(process.pid, how)
    process.communicate()
    assert (sockets, made) == (folder, 1)
    if how == signal.SIGKILL:
        assert len([*SEMAPHORES.glob(f"sem.{folder.name}-*")]) == 1
        sweep()
    assert not folder.exists() and [*SEMAPHORES.glob(f"sem.{folder.name}-*")] == []


BEAT = """import sys; from pathlib import Path; from ultrascale import heartbeat
heartbeat.start(Path(sys.argv[1]), 0, hang_seconds=9); print(flush=True)
"""


@pytest.mark.parametrize(
    ("old", "lives", "stack", "stays"),
    [(True, False, "", False), (False, False, "", True), (True, True, "", True), (True, False, "a stack", True)],
)
def test_signs_of_life_of_ranks_that_are_gone_go_after_a_while(temporary, old: bool, lives: bool, stack: str, stays: bool):
    """As a rank leaves them that torchrun has started, and that was killed."""
    folder = temporary / "ultrascale-signs-abc"
    folder.mkdir()
    words = [sys.executable, "-c", BEAT + ("sys.stdin.read()" if lives else ""), str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout and rank.stdout.readline() and (lives or rank.wait() == 0)
        (folder / "0.stack").write_text(stack)
        when = time.time() - (7200 if old else 60)
        os.utime(folder, (when, when))
        sweep()
        assert folder.exists() is stays
