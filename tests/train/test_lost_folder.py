"""A run whose folder is removed, moved or replaced under it."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from launch import test_torchrun as under_torchrun
from launch.test_local import PATIENCE, events, launched, steps_logged, wait_until
from train.small_runs import at_step, make_corpus, rows, same, small_run, state, stop_at, train_here, train_ranks
from train.test_stop import make_loss_nan

from ultrascale.cli.main import main
from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Run
from ultrascale.train.folder import run_folder
from ultrascale.train.folder.run_folder import RANK_LOCK, RESCUED, RunFolderLostError
from ultrascale.train.observers.anomalies import NonFiniteError
from ultrascale.train.trainer import Trainer

ZERO_2 = Layout(dp=2, zero_stage=2, micro_batch_size=2)


@pytest.fixture(autouse=True)
def looks_every(monkeypatch) -> Callable[[float], None]:
    """Sets how often a run looks after its folder; here it is often."""

    def set_seconds(seconds: float) -> None:
        monkeypatch.setattr(run_folder, "WATCH_SECONDS", seconds)

    set_seconds(0.02)
    return set_seconds


def remove(folder: Path) -> None:
    while folder.exists():  # a save in the background removes old checkpoints meanwhile
        shutil.rmtree(folder, ignore_errors=True)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def put_another_in_its_place(folder: Path) -> None:
    remove(folder)
    folder.mkdir()


def put_a_link_in_its_place(folder: Path) -> None:
    move(folder)
    folder.with_name("another").mkdir()
    folder.symlink_to(folder.with_name("another"))


def let_another_take_its_lock(folder: Path) -> None:
    taken = open(folder / "other", "w")  # noqa: SIM115 (held until this process ends)
    fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(folder / "other", folder / RANK_LOCK)  # never without a lock file, which the run would make anew
    KEPT.append(taken)


KEPT: list = []


def long_run(home: Path) -> Run:
    return small_run(home, layout=ZERO_2, steps=100_000, batch=replace(small_run(home).batch, ramp=()))


def saved_at(place: Path, run: Run) -> Run:
    return replace(run, folder=str(place.parent), name=place.name)


@pytest.mark.catalogue(34)
@pytest.mark.parametrize(
    ("lose", "told"),
    [
        (remove, "was removed while"),
        (move, "was moved to {moved} while"),
        (put_another_in_its_place, "was removed, and something else is in its place while"),
        (put_a_link_in_its_place, "was moved to {moved}, and something else is in its place while"),
        (let_another_take_its_lock, "was taken by another process, after its .lock was removed while"),
    ],
)
def test_a_run_whose_folder_is_lost_stops_and_saves_elsewhere_on_all_ranks_and_says_where(home, lose, told):
    run, moved = long_run(home), home / "moved"
    first, second = train_ranks(run, before_step=at_step(5, lambda trainer: lose(home / "small"), rank=0))
    assert first == second
    assert first["error"] == "RunFolderLostError"
    assert first["text"].startswith(
        f"{home / 'small'} {told.format(moved=moved)} the run trained in it: the run has stopped, and"
    )
    place = moved if moved.exists() else next(home.glob(f"small{RESCUED}*"))
    assert first["text"].endswith(f" in {place}; `ultrascale train {place}` goes on from there.")
    assert not (home / "small").is_dir() or lose is let_another_take_its_lock or os.listdir(home / "small") == []
    (checkpoint,) = (place / "checkpoints").iterdir()
    done = int(checkpoint.name.removeprefix("step-"))
    train_ranks(replace(run, name="calm"), before_step=stop_at(done))
    assert same(state(saved_at(place, run)), state(replace(run, name="calm")))


def test_the_command_that_the_sentence_names_goes_on_to_the_same_bits(home):
    run, calm = small_run(home), small_run(home, name="calm")
    with pytest.raises(RunFolderLostError) as caught:
        train_here(run, before_step=at_step(5, lambda trainer: remove(home / "small")))
    (words,) = re.findall(r"`ultrascale (.*)`", str(caught.value))
    assert main(shlex.split(words)) == 0
    train_here(calm)
    (place,) = home.glob(f"small{RESCUED}*")
    assert same(state(saved_at(place, run)), state(calm))


def test_a_run_that_begins_anew_where_one_was_lost_says_where_that_is_saved(home, capsys):
    run = small_run(home)
    with pytest.raises(RunFolderLostError):
        train_here(run, before_step=at_step(5, lambda trainer: remove(home / "small")))
    train_here(run)
    (place,) = home.glob(f"small{RESCUED}*")
    assert f"note: starting anew, though {place} holds what was saved" in capsys.readouterr().out


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_next_save_sees_the_loss_before_anything_is_written(home, looks_every, asynchronous):
    looks_every(1000.0)
    run = small_run(home, checkpoint=Checkpoint(every_steps=2, keep=2, export=False, asynchronous=asynchronous))
    with pytest.raises(RunFolderLostError, match="saved at step 8 in "):
        train_here(run, before_step=at_step(7, lambda trainer: put_another_in_its_place(home / "small")))
    assert os.listdir(home / "small") == []


def is_locked(file: Path) -> bool:
    """Whether it is there and somebody holds its lock, as the kernel tells: to try would be to take it for a moment."""
    held = [line.split()[5].rpartition(":")[2] for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" in line]
    return file.exists() and str(file.stat().st_ino) in held


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="locks are not to be seen here")
def test_a_lock_file_that_was_cleared_away_is_made_anew_and_keeps_others_out(home):
    run, seen = small_run(home), []

    def clear_and_try(trainer) -> None:
        (home / "small" / RANK_LOCK).unlink()
        until = time.monotonic() + 60
        while not is_locked(home / "small" / RANK_LOCK) and time.monotonic() < until:
            time.sleep(0.01)
        seen.extend(train_ranks(run))

    assert train_here(run, before_step=at_step(3, clear_and_try)).steps_done == 12
    assert "another process is training in this folder" in seen[0]["text"]


@pytest.mark.catalogue(34)
@pytest.mark.parametrize("lose", [remove, put_another_in_its_place, put_a_link_in_its_place])
def test_checkpoints_removed_from_a_run_are_told_and_the_next_ones_saved(home, capsys, lose):
    run = small_run(home, checkpoint=Checkpoint(every_steps=4, keep=2, export=False))
    train_here(run, before_step=at_step(6, lambda trainer: lose(home / "small" / "checkpoints")))
    assert sorted(path.name for path in (home / "small" / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]
    assert capsys.readouterr().out.count("WARNING: ") == 1
    assert events(run).count("checkpoints lost") == 1


def test_an_anomaly_is_not_trained_over_where_the_checkpoint_to_go_back_to_was_removed(home):
    def spoil(trainer: Trainer) -> None:
        remove(home / "small" / "checkpoints")
        make_loss_nan(trainer)

    faults = replace(small_run(home).faults, on_anomaly="rewind")
    run = small_run(home, checkpoint=Checkpoint(every_steps=4, keep=2, export=False), faults=faults)
    with pytest.raises(NonFiniteError):
        train_here(run, before_step=at_step(6, spoil))


@pytest.mark.catalogue(14, 34)
def test_a_folder_removed_under_a_command_is_taken_by_the_next_one_and_every_step_stands_there_once(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = replace(long_run(tmp_path), checkpoint=Checkpoint(every_steps=10, keep=3, export=False))
    second = replace(run, steps=40)
    with launched(run) as process:
        wait_until(lambda: steps_logged(run) >= 12, process)
        remove(tmp_path / "small")
        file = tmp_path / "second.toml"
        file.write_text(to_toml(second))
        words = [sys.executable, "-m", "ultrascale", "train", str(file)]
        subprocess.run(words, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=PATIENCE)
        told, code = process.communicate(timeout=PATIENCE)[0], process.returncode
    assert code == 1 and "Traceback" not in told and "starting again" not in told, told
    assert "ultrascale: error on rank 0: " in told and told.count("was removed") == 1, told
    assert rows(second, "step") == [(step,) for step in range(1, 41)]
    assert events(second) == ["start", "stepped", "end"]
    assert len(list(tmp_path.glob(f"small{RESCUED}*/checkpoints/step-*"))) == 1


@pytest.mark.nightly
@pytest.mark.catalogue(34)
def test_torchrun_does_not_begin_a_run_anew_whose_folder_was_moved_away(tmp_path):
    make_corpus(tmp_path / "tokens")
    run = replace(long_run(tmp_path), checkpoint=Checkpoint(every_steps=10, keep=3, export=False))
    with under_torchrun.torchrun(run) as process:
        under_torchrun.wait_until(lambda: steps_logged(run) >= 12, process)
        move(tmp_path / "small")
        assert process.wait(PATIENCE) == 1
    assert (tmp_path / "said.log").read_text().count("not started again: ") == 3
    assert not (tmp_path / "small").exists() and len(list((tmp_path / "moved" / "checkpoints").iterdir())) == 2


def test_the_log_of_a_run_ends_with_where_its_export_is(home):
    run = small_run(home, steps=2, checkpoint=Checkpoint(every_steps=2, export=True))
    train_here(run)
    last = (Path(run.folder) / run.name / "log.txt").read_text().splitlines()[-1]
    assert last.startswith("done: 2 steps; Hugging Face folder in ") and last.endswith("export")
