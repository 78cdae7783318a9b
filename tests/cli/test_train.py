"""`ultrascale train`: one command to start, to go on, and to be told what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from api.validator import wrong
from train.small_runs import STEPS, curve, make_corpus, small_run

from ultrascale import checkpoint
from ultrascale.cli import train as verb
from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.launch import local
from ultrascale.launch.local import Ending
from ultrascale.train import loop, worker


@pytest.fixture
def run_file(tmp_path, known_peak) -> Path:
    make_corpus(tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(to_toml(small_run(tmp_path)))
    return tmp_path / "run.toml"


@pytest.fixture
def ranks_end(monkeypatch) -> Callable[[Callable[..., Ending]], None]:
    """Has a command of several processes call what is given in place of starting them."""
    return lambda launch: monkeypatch.setattr(local, "launch_local", launch)


def train(run_file: Path, *words: str) -> int:
    return main(["train", str(run_file), *words])


def test_a_run_is_trained_and_its_end_told_as_json(run_file, capsys):
    assert train(run_file, "--optimizer.learning-rate", "1e-3", "--json") == 0
    told = capsys.readouterr()
    summary = json.loads(told.out)  # nothing else is there
    assert f"step {STEPS}/{STEPS}  loss" in told.err
    assert told.err.splitlines()[-1].endswith(f": ultrascale report {run_file.parent / 'small'}")
    assert summary["finished"] and summary["last"]["step"] == STEPS and wrong(summary) == []
    assert resolve(run_file.parent / "small").run.optimizer.learning_rate == 1e-3


def test_the_command_of_one_island_leaves_the_last_word_to_the_command_of_all(tmp_path, monkeypatch, capsys):
    run = small_run(tmp_path)
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setattr(verb, "_train", lambda *arguments: (run, 0))
    for words, lines in (([], 1), (["--island", "0"], 0)):
        assert main(["train", "run.toml", *words]) == 0
        assert len(capsys.readouterr().out.splitlines()) == lines


def test_a_run_goes_on_in_its_folder_also_after_that_was_renamed(run_file, tmp_path, capsys):
    assert train(run_file, "--steps", "8") == 0
    (tmp_path / "small").rename(tmp_path / "renamed")
    assert train(tmp_path / "renamed", "--steps", "12") == 0
    assert "resumed from" in capsys.readouterr().out
    assert [step for step, *_ in curve(small_run(tmp_path, name="renamed"))] == list(range(1, STEPS + 1))
    assert not (tmp_path / "small").exists()


def test_a_complete_run_started_again_says_that_nothing_is_left(run_file, capsys):
    assert train(run_file, "--steps", "8") == 0
    assert "\ncomplete: " not in capsys.readouterr().out
    assert train(run_file, "--steps", "8") == 0
    assert "complete: all 8 steps are done; --steps N for more\n" in capsys.readouterr().out


def test_the_run_folder_keeps_the_flags_it_was_started_with(run_file, tmp_path):
    assert train(run_file, "--name", "other", "--seed", "7") == 0
    assert main(["train", str(tmp_path / "other"), "--name", "third"]) == 0
    assert resolve(tmp_path / "third").run == resolve(tmp_path / "other", ["--name", "third"]).run


def test_an_error_for_people_ends_with_1_and_a_wrong_description_with_2(run_file, capsys):
    assert train(run_file, "--optimizer.learning-rate", "1e300", "--optimizer.clip-grad-norm", "none") == 1
    assert "not finite" in (told := capsys.readouterr().err) and "Traceback" not in told
    assert train(run_file, "--name", "b", "--steps", "4", "--optimizer.decay-steps", "none") == 0
    assert train(run_file, "--name", "b", "--seed", "4") == 2
    assert "  seed\n    is 4, but step-00000004 was trained with 3\n" in capsys.readouterr().err


def test_under_torchrun_a_world_of_another_size_is_a_wrong_description(run_file, capsys, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert train(run_file) == 2
    told = capsys.readouterr().err
    assert "the layout is for 1 process, but 2 were started" in told and "or give `--layout.dp 2`" in told
    assert train(run_file, "--layout.tp", "2", "--layout.pp", "2") == 2
    assert "Start 4 (`--processes 4`), or give a layout for so many" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending, code, message",
    [
        (Ending(""), 0, ""),
        (Ending("stopped by SIGTERM", stopped=True, saved=True), 0, ""),
        (
            Ending("stopped by SIGTERM, and the ranks ended without saving", stopped=True),
            1,
            "without saving\n    -> What is saved is in",
        ),
        (Ending("stopped by SIGTERM; rank 0 failed", stopped=True, explained=True), 1, ""),
        (Ending("rank 1 was ended by SIGKILL"), 1, "  rank 1\n    was ended by SIGKILL\n    -> What is saved is in"),
        (Ending("rank 0 failed", exit_code=2, explained=True), 2, ""),
    ],
)
def test_several_processes_end_as_their_launcher_says(run_file, capsys, ranks_end, ending, code, message):
    save(1)(run_file.parent / "small" / "checkpoints")
    ranks_end(lambda file, processes, **options: ending)
    assert train(run_file, "--processes", "2") == code
    told = capsys.readouterr().err
    assert message in told and (message != "" or told == "")


def test_every_option_of_train_reaches_several_processes_as_it_reaches_one(run_file, ranks_end):
    kinds = get_type_hints(verb.TrainOptions)
    given = {name: True if kinds[name] is bool else 2e12 for name in verb.TrainOptions("run.toml").of_ranks()}
    words = [
        word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", *[str(value)] * (value is not True))
    ]
    received: list[tuple[str, ...]] = []

    def of_ranks(*arguments: Any, worker_arguments: tuple[str, ...], **rest: Any) -> Ending:
        received.append(worker_arguments)
        return Ending("")

    ranks_end(of_ranks)
    assert train(run_file, "--processes", "2", *words) == 0
    (flags,) = received
    read = vars(worker.build_parser().parse_args([str(run_file), *flags]))
    assert {name: read[name] for name in given} == given
    assert given.keys() <= signature(loop.train).parameters.keys()


def progress_seen(run_file: Path, ranks_end, make: list[Callable[[Path], object]]) -> list[str]:
    """What counts restarts by, before and after each of `make` has done something in the folder of the checkpoints."""
    root, seen = run_file.parent / "small" / "checkpoints", []

    def launch(*words: object, progress: Callable[[], str], **options: object) -> Ending:
        seen.append(progress())
        for one in make:
            one(root)
            seen.append(progress())
        return Ending("")

    ranks_end(launch)
    assert train(run_file, "--processes", "2") == 0
    return seen


def save(step: int) -> Callable[[Path], object]:
    return lambda root: checkpoint.save(root, step, {"w": torch.ones(2)}, {})


@pytest.mark.catalogue(9)
@pytest.mark.parametrize("name", ["step-backup", "step-99", "step-00000099-copy", "step-99999999"])
def test_restarts_are_counted_by_new_checkpoints_whatever_else_is_called_like_one(run_file, ranks_end, name):
    seen = progress_seen(run_file, ranks_end, [lambda root: (root / name).mkdir(parents=True), save(5), save(10)])
    assert seen == ["none", "none", "step-00000005", "step-00000010"]


@pytest.mark.catalogue(9)
def test_a_damaged_newer_checkpoint_is_no_progress_and_hides_none(run_file, ranks_end):
    def cut(root: Path) -> None:
        os.truncate(root / "step-00000090" / "rank-00000.safetensors", 10)

    def flip_and_tell(root: Path) -> None:
        """As ranks do that read every byte."""
        root.with_name("events.jsonl").write_text('{"event": "start", "step": 5, "damaged": ["step-00000080"]}\n')

    seen = progress_seen(run_file, ranks_end, [save(90), cut, save(5), save(80), flip_and_tell, save(10)])
    assert [name.removeprefix("step-000000") for name in seen] == ["none", "90", "none", "05", "80", "05", "10"]


def test_of_a_run_that_ends_before_its_first_save_no_checkpoint_is_promised(run_file, capsys, ranks_end):
    ranks_end(lambda file, processes, **options: Ending("stopped by SIGINT", stopped=True))
    assert train(run_file, "--processes", "2") == 1
    assert "stopped by SIGINT\n    -> Nothing is saved yet." in capsys.readouterr().err


@pytest.mark.parametrize(
    "code, step, after, told", [(1, None, False, 0), (2, None, False, 0), (1, 3, False, 2), (1, None, True, 2)]
)
def test_what_restarts_have_cost_is_not_told_of_a_start_that_was_refused(
    run_file, tmp_path, capsys, ranks_end, code, step, after, told
):
    events = [{"event": "failure", "time": 1.0, "cause": "no"}, {"event": "start", "time": 2.0, "step": 0}]
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    ending = Ending("rank 0 failed: no", exit_code=code, explained=True, step=step, after_failures=after)
    ranks_end(lambda file, processes, **options: ending)
    assert train(run_file, "--processes", "2") == code
    assert len(capsys.readouterr().out.splitlines()) == told


@pytest.mark.parametrize(
    "words, message",
    [
        (["nowhere.toml"], "there is no such file"),
        (["{run}", "--processes", "0"], "must be at least 1, is 0"),
        (["{run}", "--processes", "3", "--layout.tp", "2"], "3 processes are not a multiple of tp = 2"),
        (["{run}", "--processes", "4", "--layout.dp", "4", "--layout.tp", "2"], "leave dp = 2 beside tp = 2, but"),
        (["{run}", "--processes", "3"], "must be a multiple of layout.dp x layout.micro_batch_size = 6, is 8"),
        (["{run}", "--laoyut.dp", "2"], "Did you mean --layout.dp?"),
        (["{run}", "--layout.pp", "2", "--layout.schedule", "{backward_first}"], "needs what 0F0 (rank 0, action 1) keeps"),
        (["{run}", "--max-restarts", "-1"], "must be at least 0, is -1"),
        (["{run}", "--log.sinks", "wandb"], "pip install wandb"),
        (["{run}", "--data.sources", "[]"], "names no corpus to train on"),
    ],
)
def test_a_mistake_is_told_with_its_remedy_before_anything_starts(run_file, tmp_path, capsys, monkeypatch, words, message):
    monkeypatch.setitem(sys.modules, "wandb", None)
    backward_first = tmp_path / "backward_first.csv"
    backward_first.write_text("0B0,0F0\n1F0,1B0\n")
    assert main(["train", *(word.format(run=run_file, backward_first=backward_first) for word in words)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "small").exists()  # not even a folder is made


def test_of_ranks_that_are_started_too_only_json_goes_to_stdout(run_file):
    words = [sys.executable, "-m", "ultrascale", "train", str(run_file), "--processes", "2", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["last"]["step"] == STEPS
    assert f"step {STEPS}/{STEPS}  loss" in done.stderr
